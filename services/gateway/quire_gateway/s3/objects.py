"""Requests on one object: get, put, copy, delete, and its multipart uploads."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from email.utils import formatdate
from typing import Final
from urllib.parse import unquote

from aiohttp import web

from quire.model.buckets import StoredObject
from quire_gateway.core.preconditions import Preconditions
from quire_gateway.core.ranges import check_read, check_write, read_copy_range, read_part, read_range
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.s3 import xml
from quire_gateway.s3.backend import Backend, ExpectedObject, ObjectBackend
from quire_gateway.s3.backends import Backends
from quire_gateway.s3.call import Call
from quire_gateway.s3.checksums import COMPOSITE, FULL_OBJECT, PREFIX, checksum_type_of, kind_of
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
        """GetObject, HeadObject: ranges and conditions; an object is one part."""
        backend = self._backends.backend(call.caller, call.bucket, call.key, AccessLevel.READ)
        entry = await _found(backend, call)
        check_read(call.conditions, entry.etag, entry.modified_s)
        if "partNumber" in call.query:
            part = call.number("partNumber", 1, 1, _PARTS_MAX)
            span = read_part(part, call.header("Range"), entry.size)
        else:
            span = read_range(call.header("Range"), entry.size)
        headers = _headers(entry)
        headers |= _overrides(call)
        start, end = span or (0, entry.size)
        if span is not None:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{entry.size}"
        elif call.header("x-amz-checksum-mode").upper() == "ENABLED":
            headers |= {PREFIX + name: value for name, value in entry.checksums.items()}
            if entry.checksums:
                headers[f"{PREFIX}type"] = kind_of(entry.checksums)
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
        await call.go_on()
        entry = await backend.put(call.key, body, described, expected)
        headers = {"ETag": f'"{entry.etag}"'} | {PREFIX + name: value for name, value in entry.checksums.items()}
        return web.Response(headers=headers)

    async def delete(self, call: Call) -> web.StreamResponse:
        """DeleteObject."""
        backend = self._backends.backend(call.caller, call.bucket, call.key, AccessLevel.WRITE)
        etag = ""
        if call.header("If-Match"):
            etag = await expected_etag(backend, call.key, Preconditions(if_match=call.header("If-Match")))
        await backend.delete(call.key, etag)
        return web.Response(status=204)

    async def copy(self, call: Call) -> web.StreamResponse:
        """CopyObject, by copies of the blobs."""
        target = self._object_backend(call)
        source, entry = await self._source(call)
        if entry.size > _COPY_BYTES_MAX:
            raise S3Error("InvalidRequest", "The copy source is larger than 5 GiB; copy it in parts")
        replacing = call.header("x-amz-metadata-directive").upper() == "REPLACE"
        same = source.place == target.place and entry.key == call.key
        if same and not replacing:
            raise S3Error("InvalidRequest", "This copy request is illegal: it copies an object to itself, unchanged")
        described = call.described()
        if not replacing:
            described = type(described)(entry.headers, entry.metadata)
        expected = await expected_etag(target, call.key, call.conditions) if call.conditions.of_write else ""
        target_entry = replace(entry, key=call.key)
        copied = await target.copy(target_entry, source, described, expected)
        children = [("LastModified", xml.stamp(copied.modified_s)), ("ETag", f'"{copied.etag}"')]
        return xml_answer(xml.document("CopyObjectResult", children))

    async def _source(self, call: Call) -> tuple[ObjectBackend, StoredObject]:
        """Return backend and entry of x-amz-copy-source, after a check of its conditions. Raises `S3Error`."""
        quoted, _, version = call.header("x-amz-copy-source").partition("?versionId=")  # a key's own are encoded
        if version not in ("", "null"):
            raise S3Error("NotImplemented", "There are no versions")
        bucket, _, key = unquote(quoted).removeprefix("/").partition("/")
        if not bucket or not key:
            raise S3Error("InvalidArgument", "x-amz-copy-source is bucket/key")
        backend = self._backends.object_backend(call.caller, bucket, key, AccessLevel.READ)
        entry = await backend.head(key)
        if entry is None:
            raise S3Error("NoSuchKey", "The specified key does not exist.")
        names = ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since")
        conditions = Preconditions(*(call.header(f"x-amz-copy-source-{name}") for name in names))
        try:
            check_read(conditions, entry.etag, entry.modified_s)
        except S3Error as error:
            raise S3Error("PreconditionFailed", error.message) from None
        return backend, entry

    async def acl(self, call: Call) -> web.StreamResponse:
        """GetObjectAcl: always `private`."""
        backend = self._backends.object_backend(call.caller, call.bucket, call.key, AccessLevel.READ)
        await _found(backend, call)
        return xml_answer(xml.private_policy(backend.place[0]))

    async def set_acl(self, call: Call) -> web.StreamResponse:
        """PutObjectAcl: the canned one that everything has; others were refused already."""
        await _found(self._object_backend(call), call)
        await call.check_private()
        return web.Response()

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
            source, entry = await self._source(call)
            byte_range = call.header("x-amz-copy-source-range")
            span = read_copy_range(byte_range, entry.size) if byte_range else (0, entry.size)
            part = await backend.copy_part(call.key, upload_id, number, span[1] - span[0], source.read(entry, *span))
            children = [("LastModified", xml.stamp(part.modified_s)), ("ETag", f'"{part.etag}"')]
            children += xml.checksum_elements(part.checksums)
            return xml_answer(xml.document("CopyPartResult", children))
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
        return xml_answer(xml.document("CompleteMultipartUploadResult", children))

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


async def _found(backend: Backend, call: Call) -> StoredObject:
    entry = await backend.head(call.key)
    if entry is None:
        raise S3Error("NoSuchKey", "The specified key does not exist.")
    return entry


async def expected_etag(backend: Backend, key: str, conditions: Preconditions) -> str:
    """Return the condition on a write: checked now, and again when it is committed."""
    entry = await backend.head(key)
    check_write(conditions, entry.etag if entry is not None else None)
    return "absent" if entry is None else entry.etag


def _overrides(call: Call) -> dict[str, str]:
    """Return the response headers of the query. Raises `S3Error` InvalidArgument for an impossible one."""
    headers = {name: call.query[parameter] for parameter, name in _OVERRIDES.items() if parameter in call.query}
    if any(not value.isprintable() for value in headers.values()):
        raise S3Error("InvalidArgument", "A response header cannot hold control characters")
    return headers


def _headers(entry: StoredObject) -> dict[str, str]:
    headers = {"content-type": "binary/octet-stream"} | dict(entry.headers)
    headers |= {f"x-amz-meta-{name}": value for name, value in entry.metadata.items()}
    headers["ETag"] = f'"{entry.etag}"'
    headers["Last-Modified"] = formatdate(entry.modified_s, usegmt=True)
    headers["Accept-Ranges"] = "bytes"
    return headers


def xml_answer(body: bytes) -> web.Response:
    """200 with a document."""
    return web.Response(body=body, headers={"Content-Type": "application/xml"})
