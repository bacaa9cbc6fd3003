"""Requests on buckets, and on the list of them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from quire.model.buckets import NULL_VERSION, MultipartUpload, StoredObject
from quire.model.errors import QuireError
from quire.model.policy import ENTRY_BYTES
from quire_gateway.core.s3_errors import S3Error, s3_error_of
from quire_gateway.s3 import xml
from quire_gateway.s3.access import RESERVED
from quire_gateway.s3.backends import Backends
from quire_gateway.s3.call import PUBLIC_READ, Call, check_bucket_name, check_key, checked_version
from quire_gateway.s3.deletions import DeleteConditions, delete
from quire_gateway.s3.listing import ObjectListing, list_objects, list_versions
from quire_gateway.s3.objects import xml_answer
from quire_gateway.s3.public import SETTING, PublicBuckets
from quire_server.redis.keys.access import SYSTEM_TENANT, AccessLevel

_MAX_KEYS: Final = 1000
_BUCKETS_LISTED_MAX: Final = 10_000
_BUCKETS_MAX: Final = 1000


class BucketRequests:
    """Every method answers one kind of request."""

    def __init__(
        self, backends: Backends, region: str, on_failure: Callable[[str, Exception], None], public: PublicBuckets
    ) -> None:
        """`on_failure`: called with each deletion of a DeleteObjects that fails."""
        self._backends = backends
        self._public = public
        self._on_failure = on_failure
        self._region = region

    async def list_buckets(self, call: Call) -> web.StreamResponse:
        """ListBuckets: the caller's own, and those granted to it."""
        tenant = call.caller.key.tenant
        buckets = dict(await self._backends.buckets.all(tenant))
        for grant in call.caller.key.grants:
            buckets.setdefault(grant.bucket, 0.0)
        prefix, token = call.query.get("prefix", ""), call.query.get("continuation-token", "")
        limit = call.number("max-buckets", _BUCKETS_LISTED_MAX, 1, _BUCKETS_LISTED_MAX)
        names = sorted(name for name in buckets if name.startswith(prefix) and name > token)
        entries = [("Bucket", [("Name", name), ("CreationDate", xml.stamp(buckets[name]))]) for name in names[:limit]]
        owner = ("Owner", [("ID", tenant), ("DisplayName", tenant)])
        children: list[tuple[str, Any]] = [owner, ("Buckets", entries)]
        if prefix:
            children.append(("Prefix", prefix))
        if len(names) > limit:
            children.append(("ContinuationToken", names[limit - 1]))
        return xml_answer(xml.document("ListAllMyBucketsResult", children))

    async def create(self, call: Call) -> web.StreamResponse:
        """CreateBucket. The tenant's own; 409 if it has it already."""
        check_bucket_name(call.bucket)
        xml.check_create(await call.xml())
        caller = call.caller
        tenant = caller.tenant_of(call.bucket)
        if call.bucket in RESERVED:
            raise S3Error("BucketAlreadyExists", "The requested bucket name is not available.")
        caller.check(tenant, call.bucket, "", AccessLevel.ADMIN)
        _check_publisher(call, tenant)
        buckets = dict(await self._backends.buckets.all(tenant))
        if call.bucket not in buckets and len(buckets) >= _BUCKETS_MAX:
            raise S3Error("TooManyBuckets", f"You have {_BUCKETS_MAX} buckets, as many as a tenant may have")
        async with self._backends.room(tenant, 0 if call.bucket in buckets else ENTRY_BYTES):
            new = await self._backends.buckets.create(tenant, call.bucket, self._backends.clock.now_ms() / 1e3)
        if not new and self._region != "us-east-1":  # there AWS answers as for a new one
            raise S3Error(
                "BucketAlreadyOwnedByYou", "The bucket that you tried to create already exists, and you own it"
            )
        await self._set_acl(call, tenant, call.bucket)  # also of one that was there, as AWS does there
        return web.Response(headers={"Location": f"/{call.bucket}"})

    async def head(self, call: Call) -> web.StreamResponse:
        """HeadBucket."""
        await self._backends.backend(call.caller, call.bucket, "", AccessLevel.READ).check_there()
        return web.Response(headers={"x-amz-bucket-region": self._region})

    async def delete(self, call: Call) -> web.StreamResponse:
        """DeleteBucket. 409 unless it is empty."""
        backend = self._backends.object_backend(call.caller, call.bucket, "", AccessLevel.ADMIN)
        await backend.check_there()
        if not await self._backends.buckets.drop(*backend.place, self._backends.clock.now_ms()):
            raise S3Error("BucketNotEmpty", "The bucket you tried to delete is not empty")
        return web.Response(status=204)

    async def location(self, call: Call) -> web.StreamResponse:
        """GetBucketLocation."""
        await self._backends.backend(call.caller, call.bucket, "", AccessLevel.READ).check_there()
        region = "" if self._region == "us-east-1" else self._region
        body = xml.document("LocationConstraint", [])
        return xml_answer(body.replace(b"</LocationConstraint>", region.encode() + b"</LocationConstraint>"))

    async def acl(self, call: Call) -> web.StreamResponse:
        """GetBucketAcl: `private`, or `public-read`."""
        backend = self._backends.object_backend(call.caller, call.bucket, "", AccessLevel.ADMIN)
        await backend.check_there()
        return xml_answer(xml.access_policy(backend.place[0], public=await self._public.is_public(*backend.place)))

    async def set_acl(self, call: Call) -> web.StreamResponse:
        """PutBucketAcl: `private`, or `public-read`; others were refused already."""
        backend = self._backends.object_backend(call.caller, call.bucket, "", AccessLevel.ADMIN)
        await backend.check_there()
        await call.check_canned()
        _check_publisher(call, backend.place[0])
        await self._set_acl(call, *backend.place)
        return web.Response()

    async def _set_acl(self, call: Call, tenant: str, bucket: str) -> None:
        acl = call.header("x-amz-acl")
        setting = acl.encode() if acl == PUBLIC_READ else b""
        if not await self._backends.buckets.set(tenant, bucket, SETTING, setting):
            raise S3Error("NoSuchBucket", "The specified bucket does not exist")

    async def list_v1(self, call: Call) -> web.StreamResponse:
        """ListObjects."""
        listing_request, marker = _asked(call), call.query.get("marker", "")
        listing = await self._listed(call, listing_request, marker)
        children = [
            *listing_request.echoed(call.bucket, truncated=listing.truncated),
            ("Marker", listing_request.encoded(marker)),
        ]
        if listing.truncated:
            children.append(("NextMarker", listing_request.encoded(listing.last)))
        children += _entries(listing, listing_request, owner=call.caller.key.tenant)
        return xml_answer(xml.document("ListBucketResult", children))

    async def list_v2(self, call: Call) -> web.StreamResponse:
        """ListObjectsV2."""
        listing_request = _asked(call)
        token, start = call.query.get("continuation-token", ""), call.query.get("start-after", "")
        listing = await self._listed(call, listing_request, _from_token(token) if token else start)
        count = len(listing.objects) + len(listing.prefixes)
        children = [*listing_request.echoed(call.bucket, truncated=listing.truncated), ("KeyCount", count)]
        if "continuation-token" in call.query:
            children.append(("ContinuationToken", token))
        if "start-after" in call.query:
            children.append(("StartAfter", listing_request.encoded(start)))
        if listing.truncated:
            children.append(("NextContinuationToken", _token(listing.last)))
        owner = call.caller.key.tenant if call.query.get("fetch-owner") == "true" else ""
        children += _entries(listing, listing_request, owner)
        return xml_answer(xml.document("ListBucketResult", children))

    async def list_versions(self, call: Call) -> web.StreamResponse:
        """ListObjectVersions: with delete markers, of each key the newest first."""
        listing_request, marker = _asked(call), call.query.get("key-marker", "")
        version_id = checked_version(call.query.get("version-id-marker", ""))
        if version_id and not marker:
            raise S3Error("InvalidArgument", "A version-id marker cannot be specified without a key marker.")
        backend = self._backends.backend(call.caller, call.bucket, listing_request.prefix, AccessLevel.READ)
        listing = await list_versions(
            backend,
            listing_request.prefix,
            listing_request.delimiter,
            (marker, version_id),
            min(listing_request.limit, _MAX_KEYS),
        )
        children = [
            *listing_request.echoed(call.bucket, truncated=listing.truncated),
            ("KeyMarker", listing_request.encoded(marker)),
            ("VersionIdMarker", version_id),
        ]
        if listing.truncated:
            children.append(("NextKeyMarker", listing_request.encoded(listing.last)))
            children.append(("NextVersionIdMarker", listing.last_version))
        tenant = call.caller.tenant_of(call.bucket)
        owner = ("Owner", [("ID", tenant), ("DisplayName", tenant)])
        for entry, is_latest in listing.versions:
            about: list[tuple[str, Any]] = [
                ("Key", listing_request.encoded(entry.key)),
                ("VersionId", entry.version_id or NULL_VERSION),
                ("IsLatest", str(is_latest).lower()),
                owner,
            ]
            if entry.is_marker:
                children.append(("DeleteMarker", [*about, ("LastModified", xml.stamp(entry.modified_s))]))
            else:
                children.append(("Version", [*about, *_about(entry)]))
        children += _prefixes(listing.prefixes, listing_request)
        return xml_answer(xml.document("ListVersionsResult", children))

    async def _listed(self, call: Call, listing_request: _Asked, marker: str) -> ObjectListing:
        backend = self._backends.backend(call.caller, call.bucket, listing_request.prefix, AccessLevel.READ)
        return await list_objects(
            backend, listing_request.prefix, listing_request.delimiter, marker, min(listing_request.limit, _MAX_KEYS)
        )

    async def list_uploads(self, call: Call) -> web.StreamResponse:
        """ListMultipartUploads."""
        backend = self._backends.object_backend(call.caller, call.bucket, "", AccessLevel.WRITE)
        await backend.check_there()
        prefix, encoding = call.query.get("prefix", ""), call.query.get("encoding-type", "")
        delimiter = call.query.get("delimiter", "")
        marker = call.query.get("key-marker", ""), call.query.get("upload-id-marker", "")
        limit = min(call.number("max-uploads", _MAX_KEYS, 0, (1 << 31) - 1), _MAX_KEYS)
        uploads = sorted(
            (item for item in await backend.uploads() if item.key.startswith(prefix) and _is_after(item, *marker)),
            key=lambda item: (item.key, item.upload_id),
        )
        groups = _grouped(uploads, prefix, delimiter, marker[0])
        page, truncated = groups[:limit], bool(limit) and len(groups) > limit
        children: list[tuple[str, Any]] = [
            ("Bucket", call.bucket),
            ("KeyMarker", xml.encoded(marker[0], encoding)),
            ("UploadIdMarker", marker[1]),
            ("Prefix", xml.encoded(prefix, encoding)),
            ("MaxUploads", limit),
            ("IsTruncated", str(truncated).lower()),
        ]
        if truncated and page:
            last = page[-1]
            children.append(("NextKeyMarker", xml.encoded(last if isinstance(last, str) else last.key, encoding)))
            children.append(("NextUploadIdMarker", "" if isinstance(last, str) else last.upload_id))
        if delimiter:
            children.append(("Delimiter", xml.encoded(delimiter, encoding)))
        if encoding:
            children.append(("EncodingType", encoding))
        for group in page:
            if isinstance(group, str):
                children.append(("CommonPrefixes", [("Prefix", xml.encoded(group, encoding))]))
                continue
            about = [("Key", xml.encoded(group.key, encoding)), ("UploadId", group.upload_id)]
            if group.algorithm:
                about.append(("ChecksumAlgorithm", group.algorithm.upper()))
            children.append(("Upload", [*about, ("Initiated", xml.stamp(group.started_s))]))
        return xml_answer(xml.document("ListMultipartUploadsResult", children))

    async def delete_objects(self, call: Call) -> web.StreamResponse:
        """DeleteObjects: each key separately; keys that may not be deleted are named, the others are deleted."""
        objects, quiet = xml.read_delete(await call.xml())
        tenant = SYSTEM_TENANT if call.bucket in RESERVED else call.caller.tenant_of(call.bucket)
        children: list[tuple[str, Any]] = []
        backend = self._backends.known(call.caller, call.bucket)
        await backend.check_there()
        for item in objects:
            about = [("Key", item.key)] + ([("VersionId", item.version_id)] if item.version_id else [])
            try:
                call.caller.check(tenant, call.bucket, item.key, AccessLevel.WRITE)
                check_key(item.key)
                checked_version(item.version_id)
                conditions = DeleteConditions(item.etag, item.modified, item.size)
                deletion = await delete(backend, item.key, item.version_id, conditions)
                if deletion.is_marker:
                    about += [("DeleteMarker", "true"), ("DeleteMarkerVersionId", deletion.version_id)]
                if not quiet:
                    children.append(("Deleted", about))
            except (QuireError, S3Error) as error:
                self._on_failure(f"S3 DELETE /{call.bucket}/{item.key}", error)
                failed = error if isinstance(error, S3Error) else s3_error_of(error)
                children.append(("Error", [*about, ("Code", failed.code), ("Message", failed.message)]))
        return xml_answer(xml.document("DeleteResult", children))


@dataclass(frozen=True, slots=True)
class _Asked:
    """Parameters of all listings."""

    prefix: str
    delimiter: str
    limit: int
    encoding: str

    def encoded(self, text: str) -> str:
        return xml.encoded(text, self.encoding)

    def echoed(self, bucket: str, *, truncated: bool) -> list[tuple[str, Any]]:
        """Return the elements that all answers begin with."""
        children: list[tuple[str, Any]] = [
            ("Name", bucket),
            ("Prefix", self.encoded(self.prefix)),
            ("MaxKeys", self.limit),
            ("IsTruncated", str(truncated).lower()),
        ]
        if self.delimiter:
            children.append(("Delimiter", self.encoded(self.delimiter)))
        if self.encoding:
            children.append(("EncodingType", self.encoding))
        return children


def _check_publisher(call: Call, tenant: str) -> None:
    """Check who makes a bucket public. Raises `S3Error` AccessDenied for a key of another tenant, also with grants."""
    if call.header("x-amz-acl") == PUBLIC_READ and call.caller.key.tenant != tenant:
        raise S3Error("AccessDenied", "Only keys of the bucket's tenant may make it public")


def _is_after(upload: MultipartUpload, key: str, upload_id: str) -> bool:
    """Whether an upload follows the markers of ListMultipartUploads, the second of which is optional."""
    return upload.key > key or (bool(upload_id) and upload.key == key and upload.upload_id > upload_id)


def _grouped(
    uploads: Sequence[MultipartUpload], prefix: str, delimiter: str, marker: str
) -> list[MultipartUpload | str]:
    """Put the prefix up to a delimiter in place of the uploads that have it, unless `marker` is that prefix."""
    groups: list[MultipartUpload | str] = []
    for upload in uploads:
        end = upload.key.find(delimiter, len(prefix)) if delimiter else -1
        group = upload.key[: end + len(delimiter)] if end >= 0 else upload
        if group != marker and group not in groups[-1:]:
            groups.append(group)
    return groups


def _asked(call: Call) -> _Asked:
    encoding = call.query.get("encoding-type", "")
    if encoding not in ("", "url"):
        raise S3Error("InvalidArgument", "Invalid Encoding Method specified in Request")
    limit = call.number("max-keys", _MAX_KEYS, 0, (1 << 31) - 1)
    return _Asked(call.query.get("prefix", ""), call.query.get("delimiter", ""), limit, encoding)


def _entries(listing: ObjectListing, listing_request: _Asked, owner: str) -> list[tuple[str, Any]]:
    elements: list[tuple[str, Any]] = []
    for entry in listing.objects:
        about: list[tuple[str, Any]] = [("Key", listing_request.encoded(entry.key)), *_about(entry)]
        if owner:
            about.append(("Owner", [("ID", owner), ("DisplayName", owner)]))
        elements.append(("Contents", about))
    return elements + _prefixes(listing.prefixes, listing_request)


def _prefixes(prefixes: Sequence[str], listing_request: _Asked) -> list[tuple[str, Any]]:
    return [("CommonPrefixes", [("Prefix", listing_request.encoded(prefix))]) for prefix in prefixes]


def _about(entry: StoredObject) -> list[tuple[str, Any]]:
    return [
        ("LastModified", xml.stamp(entry.modified_s)),
        ("ETag", f'"{entry.etag}"'),
        ("Size", entry.size),
        ("StorageClass", "STANDARD"),
    ]


def _token(key: str) -> str:
    return base64.urlsafe_b64encode(key.encode()).decode()


def _from_token(token: str) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise S3Error("InvalidArgument", "The continuation token provided is incorrect") from None
