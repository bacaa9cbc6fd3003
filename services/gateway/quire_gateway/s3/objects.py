"""Requests on one object: get, put, copy, delete, and its multipart uploads."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from email.utils import formatdate
from typing import Final
from urllib.parse import unquote

from aiohttp import web

from quire.model.buckets import NULL_VERSION, StoredObject
from quire_gateway.core.preconditions import Preconditions
from quire_gateway.core.ranges import check_read, check_write, read_copy_range, read_part, read_range
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.s3 import xml
from quire_gateway.s3.attributes import attributes_document
from quire_gateway.s3.backend import Backend, ObjectBackend
from quire_gateway.s3.backends import Backends
from quire_gateway.s3.call import Call, check_key, checked_version
from quire_gateway.s3.checksums import COMPOSITE, FULL_OBJECT, PREFIX, checksum_type_of, kind_of
from quire_gateway.s3.declared import Described, ExpectedObject
from quire_gateway.s3.deletions import DeleteConditions, delete
from quire_gateway.s3.tagging import OBJECT_TAGS_MAX, read_tagging, tagging_document
from quire_server.http_requests import send
from quire_server.limits.shared_room import SharedRoom
from quire_server.redis.keys.access import AccessLevel

_PARTS_MAX: Final = 10_000
_LIST_MAX: Final = 1000
_COPY_BYTES_MAX: Final = 5 << 30
_OVERRIDES: Final = {
    f"response-{name}": name
    for name in (
        "content-type",
        "content-language",
        "expires",
        "cache-control",
        "content-disposition",
        "content-encoding",
    )
}


READ_AHEAD_BYTES: Final = 16 << 20
"""Of a GET: the piece that is being sent, and the next one."""
SMALL_BYTES: Final = 1 << 20
"""GETs up to here wait for no room: the bound of requests is enough."""
_ROOM_S: Final = 5.0


class ObjectRequests:
    """Every method answers one kind of request."""

    def __init__(self, backends: Backends, bodies: SharedRoom) -> None:
        """`bodies`: bytes that were read for clients and are not sent yet."""
        self._backends = backends
        self._bodies = bodies

    async def get(self, call: Call) -> web.StreamResponse:
        """GetObject, HeadObject: ranges, parts, versions and conditions."""
        backend = self._backends.backend(call.caller, call.bucket, call.key, AccessLevel.READ)
        entry = await find(backend, call)
        check_read(call.conditions, entry.etag, entry.modified_s)
        headers = _headers(entry, call) | _overrides(call)
        if "partNumber" in call.query:
            part = call.number("partNumber", 1, 1, _PARTS_MAX)
            span: tuple[int, int] | None = read_part(part, call.header("Range"), entry)
            if entry.parts:
                headers["x-amz-mp-parts-count"] = str(len(entry.parts))
                checksums = next(stored.checksums for stored in entry.parts if stored.number == part)
                headers |= _checksum_headers(call, checksums, kind_of(entry.checksums))
        else:
            span = read_range(call.header("Range"), entry.size)
        start, end = span or (0, entry.size)
        if span is not None and start == end:  # a part without bytes has no range
            span = None
        if span is not None:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{entry.size}"
        else:
            headers |= _checksum_headers(call, entry.checksums, kind_of(entry.checksums))
        headers["Content-Length"] = str(end - start)
        response = web.StreamResponse(status=206 if span is not None else 200, headers=headers)
        if call.method == "HEAD" or end == start:
            await response.prepare(call.http)
            return response
        call.admitted.take(end - start)
        async with contextlib.AsyncExitStack() as stack:
            if end - start > SMALL_BYTES:
                room = self._bodies.held(call.principal.tenant, min(end - start, READ_AHEAD_BYTES), _ROOM_S)
                await stack.enter_async_context(room)
            pieces = await stack.enter_async_context(contextlib.aclosing(backend.read(entry, start, end)))  # type: ignore[type-var]
            first = await anext(pieces)  # a failure up to here is still an answer
            call.streaming = response
            await response.prepare(call.http)
            await send(response, first)
            async for piece in pieces:
                await send(response, piece)
        return response

    async def put(self, call: Call) -> web.StreamResponse:
        """PutObject: conditions, checksums, metadata."""
        backend = self._backends.backend(call.caller, call.bucket, call.key, AccessLevel.WRITE)
        conditions, expected = call.conditions, ""
        if conditions.of_write:
            expected = await expected_etag(backend, call.key, conditions)
        described, body = call.described(), call.body()
        check_tags(backend, described)
        await call.go_on()
        entry = await backend.put(call.key, body, described, expected)
        headers = {"ETag": f'"{entry.etag}"'} | {PREFIX + name: value for name, value in entry.checksums.items()}
        return web.Response(headers=headers | version_header(entry.version_id))

    async def delete(self, call: Call) -> web.StreamResponse:
        """DeleteObject: the object, if it fits conditions, or a version of it."""
        backend = self._backends.backend(call.caller, call.bucket, call.key, AccessLevel.WRITE)
        version_id = call.version_id
        names = ("If-Match", "x-amz-if-match-last-modified-time", "x-amz-if-match-size")
        deletion = await delete(backend, call.key, version_id, DeleteConditions(*(call.header(name) for name in names)))
        headers = version_header(deletion.version_id)
        if deletion.is_marker:
            headers["x-amz-delete-marker"] = "true"
        return web.Response(status=204, headers=headers)

    async def copy(self, call: Call) -> web.StreamResponse:
        """CopyObject, by copies of the blobs."""
        target = self._object_backend(call)
        source, entry, version_id = await self._source(call)
        if entry.size > _COPY_BYTES_MAX:
            raise S3Error("InvalidRequest", "The copy source is larger than 5 GiB; copy it in parts")
        replacing = call.header("x-amz-metadata-directive").upper() == "REPLACE"
        same = source.place == target.place and entry.key == call.key and not version_id
        if same and not replacing:
            raise S3Error("InvalidRequest", "This copy request is illegal: it copies an object to itself, unchanged")
        described = call.described()
        if not replacing:
            described = replace(described, headers=entry.headers, metadata=entry.metadata)
        if call.header("x-amz-tagging-directive").upper() != "REPLACE":
            described = replace(described, tags=entry.tags)
        expected = await expected_etag(target, call.key, call.conditions) if call.conditions.of_write else ""
        algorithm, _ = checksum_type_of(call.header(f"{PREFIX}algorithm"), "")
        copied = await target.copy(call.key, entry, source, described, expected, algorithm)
        children = [("LastModified", xml.stamp(copied.modified_s)), ("ETag", f'"{copied.etag}"')]
        children += xml.checksum_elements(copied.checksums)
        answer = xml_answer(xml.document("CopyObjectResult", children))
        answer.headers.update(version_header(copied.version_id))
        if version_id:
            answer.headers["x-amz-copy-source-version-id"] = version_id
        return answer

    async def _source(self, call: Call) -> tuple[ObjectBackend, StoredObject, str]:
        """Return backend, entry and version of x-amz-copy-source, after a check of its conditions. Raises `S3Error`."""
        quoted, _, version = call.header("x-amz-copy-source").partition("?versionId=")  # a key's own are encoded
        bucket, _, key = unquote(quoted).removeprefix("/").partition("/")
        if not bucket or not key:
            raise S3Error("InvalidArgument", "x-amz-copy-source is bucket/key")
        backend = self._backends.object_backend(call.caller, bucket, key, AccessLevel.READ)
        version_id = checked_version(unquote(version))
        check_key(key)
        entry = await backend.found(key, version_id)
        names = ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since")
        conditions = Preconditions(*(call.header(f"x-amz-copy-source-{name}") for name in names))
        try:
            check_read(conditions, entry.etag, entry.modified_s)
        except S3Error as error:
            raise S3Error("PreconditionFailed", error.message) from None
        return backend, entry, version_id

    async def acl(self, call: Call) -> web.StreamResponse:
        """GetObjectAcl: always `private`."""
        backend = self._backends.object_backend(call.caller, call.bucket, call.key, AccessLevel.READ)
        await find(backend, call)
        return xml_answer(xml.access_policy(backend.place[0]))

    async def set_acl(self, call: Call) -> web.StreamResponse:
        """PutObjectAcl: the canned one that everything has; others were refused already."""
        await find(self._object_backend(call), call)
        await call.check_canned()
        return web.Response()

    async def attributes(self, call: Call) -> web.StreamResponse:
        """GetObjectAttributes."""
        backend = self._backends.object_backend(call.caller, call.bucket, call.key, AccessLevel.READ)
        entry = await backend.found(call.key, call.version_id)
        check_read(call.conditions, entry.etag, entry.modified_s)
        limit = min(call.header_number("x-amz-max-parts", _LIST_MAX, 0, 1 << 29), _LIST_MAX)
        marker = call.header_number("x-amz-part-number-marker", 0, 0, _PARTS_MAX)
        answer = xml_answer(attributes_document(entry, call.header("x-amz-object-attributes"), limit, marker))
        answer.headers["Last-Modified"] = formatdate(entry.modified_s, usegmt=True)
        answer.headers.update(version_header(entry.version_id))
        return answer

    async def tagging(self, call: Call) -> web.StreamResponse:
        """GetObjectTagging."""
        backend = self._backends.object_backend(call.caller, call.bucket, call.key, AccessLevel.READ)
        entry = await backend.found(call.key, call.version_id)
        answer = xml_answer(tagging_document(entry.tags))
        answer.headers.update(version_header(entry.version_id))
        return answer

    async def set_tagging(self, call: Call) -> web.StreamResponse:
        """PutObjectTagging, of an object or a version."""
        tags = read_tagging(await call.xml(), OBJECT_TAGS_MAX)
        entry = await self._object_backend(call).tag(call.key, call.version_id, tags)
        return web.Response(headers=version_header(entry.version_id))

    async def delete_tagging(self, call: Call) -> web.StreamResponse:
        """DeleteObjectTagging, of an object or a version."""
        entry = await self._object_backend(call).tag(call.key, call.version_id, {})
        return web.Response(status=204, headers=version_header(entry.version_id))

    # ---- multipart uploads

    async def start_upload(self, call: Call) -> web.StreamResponse:
        """CreateMultipartUpload."""
        backend = self._object_backend(call)
        algorithm, full_object = checksum_type_of(call.header(f"{PREFIX}algorithm"), call.header(f"{PREFIX}type"))
        upload_id = await backend.start_upload(call.key, call.described(), algorithm, full_object)
        children = [("Bucket", call.bucket), ("Key", call.key), ("UploadId", upload_id)]
        answer = xml_answer(xml.document("InitiateMultipartUploadResult", children))
        if algorithm:
            answer.headers[f"{PREFIX}algorithm"] = algorithm.upper()
            answer.headers[f"{PREFIX}type"] = FULL_OBJECT if full_object else COMPOSITE
        return answer

    async def put_part(self, call: Call) -> web.StreamResponse:
        """UploadPart, UploadPartCopy."""
        backend = self._object_backend(call)
        number, upload_id = call.number("partNumber", 0, 1, _PARTS_MAX), call.query.get("uploadId", "")
        if not number:
            raise S3Error("InvalidArgument", f"partNumber is a number from 1 to {_PARTS_MAX}")
        if call.header("x-amz-copy-source"):
            source, entry, version_id = await self._source(call)
            byte_range = call.header("x-amz-copy-source-range")
            span = read_copy_range(byte_range, entry.size) if byte_range else (0, entry.size)
            part = await backend.copy_part(call.key, upload_id, number, span[1] - span[0], source.read(entry, *span))
            children = [("LastModified", xml.stamp(part.modified_s)), ("ETag", f'"{part.etag}"')]
            children += xml.checksum_elements(part.checksums)
            answer = xml_answer(xml.document("CopyPartResult", children))
            if version_id:
                answer.headers["x-amz-copy-source-version-id"] = version_id
            return answer
        body = call.body()
        await call.go_on()
        part = await backend.put_part(call.key, upload_id, number, body)
        checksums = {PREFIX + name: value for name, value in part.checksums.items()}
        return web.Response(headers={"ETag": f'"{part.etag}"'} | checksums)

    async def complete_upload(self, call: Call) -> web.StreamResponse:
        """CompleteMultipartUpload."""
        backend = self._object_backend(call)
        part_names, checksums = xml.read_complete(await call.xml(checked=False))
        upload_id, expected = call.query["uploadId"], ""
        if call.conditions.of_write and not await backend.was_completed(call.key, upload_id, part_names):
            expected = await expected_etag(backend, call.key, call.conditions)
        size = call.header("x-amz-mp-object-size")
        if size and not (size.isascii() and size.isdigit()):
            raise S3Error("InvalidArgument", "x-amz-mp-object-size is a number of bytes")
        declared = ExpectedObject(int(size) if size else None, checksums, call.checksums, call.header(f"{PREFIX}type"))
        completed = await backend.complete(call.key, upload_id, part_names, expected, declared)
        children = [
            ("Location", f"/{call.bucket}/{call.key}"),
            ("Bucket", call.bucket),
            ("Key", call.key),
            ("ETag", f'"{completed.etag}"'),
            *xml.checksum_elements(completed.checksums),
        ]
        if completed.checksums:
            children.append(("ChecksumType", kind_of(completed.checksums)))
        answer = xml_answer(xml.document("CompleteMultipartUploadResult", children))
        answer.headers.update(version_header(completed.version_id))
        return answer

    async def abort_upload(self, call: Call) -> web.StreamResponse:
        """AbortMultipartUpload."""
        backend = self._object_backend(call)
        await backend.abort(call.key, call.query["uploadId"])
        return web.Response(status=204)

    async def list_parts(self, call: Call) -> web.StreamResponse:
        """ListParts."""
        backend = self._object_backend(call)
        limit = call.number("max-parts", _LIST_MAX, 1, 1 << 30)
        marker = call.number("part-number-marker", 0, 0, _PARTS_MAX)
        upload_id = call.query["uploadId"]
        upload, parts = await backend.parts(call.key, upload_id)
        parts = [part for part in parts if part.number > marker]
        page = parts[: min(limit, _LIST_MAX)]
        children: list[tuple[str, object]] = [
            ("Bucket", call.bucket),
            ("Key", call.key),
            ("UploadId", upload_id),
            ("PartNumberMarker", marker),
            ("NextPartNumberMarker", page[-1].number if page else marker),
            ("MaxParts", limit),
            ("IsTruncated", str(len(page) < len(parts)).lower()),
        ]
        if upload.algorithm:
            children.append(("ChecksumAlgorithm", upload.algorithm.upper()))
            children.append(("ChecksumType", FULL_OBJECT if upload.full_object else COMPOSITE))
        for part in page:
            about = [("PartNumber", part.number), ("LastModified", xml.stamp(part.modified_s))]
            about += [("ETag", f'"{part.etag}"'), ("Size", part.size), *xml.checksum_elements(part.checksums)]
            children.append(("Part", about))
        return xml_answer(xml.document("ListPartsResult", children))

    def _object_backend(self, call: Call) -> ObjectBackend:
        return self._backends.object_backend(call.caller, call.bucket, call.key, AccessLevel.WRITE)


async def find(backend: Backend, call: Call) -> StoredObject:
    """Return the object that a request names, or a version of it. Raises `S3Error`."""
    version_id = call.version_id
    if isinstance(backend, ObjectBackend):
        return await backend.found(call.key, version_id)
    if version_id not in ("", NULL_VERSION):
        raise S3Error("NoSuchVersion", "The specified version does not exist.")
    entry = await backend.head(call.key)
    if entry is None:
        raise S3Error("NoSuchKey", "The specified key does not exist.")
    return entry


async def expected_etag(backend: Backend, key: str, conditions: Preconditions) -> str:
    """Return the condition on a write: checked now, and again when it is committed."""
    entry = await backend.head(key)
    check_write(conditions, entry.etag if entry is not None else None)
    return "absent" if entry is None else entry.etag


def _checksum_headers(call: Call, checksums: Mapping[str, str], kind: str) -> dict[str, str]:
    """Return the headers of checksums, by algorithm, if the client wants them."""
    if not checksums or call.header("x-amz-checksum-mode").upper() != "ENABLED":
        return {}
    return {PREFIX + name: value for name, value in checksums.items()} | {f"{PREFIX}type": kind}


def _overrides(call: Call) -> dict[str, str]:
    """Return the response headers of the query. Raises `S3Error` InvalidArgument for an impossible one."""
    headers = {name: call.query[parameter] for parameter, name in _OVERRIDES.items() if parameter in call.query}
    if any(not value.isprintable() for value in headers.values()):
        raise S3Error("InvalidArgument", "A response header cannot hold control characters")
    return headers


def check_tags(backend: Backend, described: Described) -> None:
    """Refuse tags for a reserved bucket. Raises `S3Error` NotImplemented."""
    if described.tags and not isinstance(backend, ObjectBackend):
        raise S3Error("NotImplemented", "Objects of this bucket have no tags")


def version_header(version_id: str) -> dict[str, str]:
    """Return the header of a version; none without versioning."""
    return {"x-amz-version-id": version_id} if version_id else {}


def _headers(entry: StoredObject, call: Call) -> dict[str, str]:
    headers = {"content-type": "binary/octet-stream"} | dict(entry.headers)
    headers |= {f"x-amz-meta-{name}": value for name, value in entry.metadata.items()}
    headers["ETag"] = f'"{entry.etag}"'
    headers["Last-Modified"] = formatdate(entry.modified_s, usegmt=True)
    headers["Accept-Ranges"] = "bytes"
    if entry.tags:
        headers["x-amz-tagging-count"] = str(len(entry.tags))
    return headers | version_header(entry.version_id or call.version_id) | call.shared_headers


def xml_answer(body: bytes) -> web.Response:
    """200 with a document."""
    return web.Response(body=body, headers={"Content-Type": "application/xml"})
