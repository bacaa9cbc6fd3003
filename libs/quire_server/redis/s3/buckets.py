"""Buckets and the objects in them, in Redis. `quire.model.buckets` defines them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, cast

import cbor2
import redis.asyncio as redis

from quire.model.buckets import (
    COMPLETED_MS,
    GRACE_MS,
    UNCOMMITTED_MS,
    Commit,
    CommitOutcome,
    DeleteOutcome,
    Deletion,
    MultipartUpload,
    Page,
    StoredObject,
    UploadPart,
    VersionsPage,
)
from quire.model.policy import ENTRY_BYTES
from quire_server.redis.connection import metadata_errors
from quire_server.redis.s3.packed_objects import (
    pack,
    pack_part,
    pack_upload,
    place_of,
    unpack,
    unpack_part,
    unpack_upload,
    with_place_of,
)
from quire_server.redis.scripts import script


class S3Buckets:
    """Buckets of all tenants. Every method is one or two round trips."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._get = client.register_script(script("s3_get"))
        self._put = client.register_script(script("s3_put"))
        self._delete = client.register_script(script("s3_delete"))
        self._delete_version = client.register_script(script("s3_delete_version"))
        self._replace = client.register_script(script("s3_replace"))
        self._set = client.register_script(script("s3_set"))
        self._drop = client.register_script(script("s3_drop"))
        self._put_part = client.register_script(script("s3_put_part"))
        self._complete = client.register_script(script("s3_complete"))
        self._abort = client.register_script(script("s3_abort"))
        self._will_write = client.register_script(script("s3_will_write"))
        self._charge = client.register_script(script("s3_charge"))
        self._removed = client.register_script(script("s3_removed"))
        self._start_upload = client.register_script(script("s3_start_upload"))

    # ---- buckets

    async def create(self, tenant: str, bucket: str, created_s: float) -> bool:
        """Whether it is new."""
        async with metadata_errors():
            new = await self._client.set(_of(tenant, bucket, "about"), cbor2.dumps(created_s), nx=True)
            await self._client.hsetnx(_buckets(tenant), bucket, cbor2.dumps(created_s))
            await self._client.sadd(_PLACES, f"{tenant}/{bucket}")
        return bool(new)

    async def exists(self, tenant: str, bucket: str) -> bool:
        async with metadata_errors():
            return bool(await self._client.exists(_of(tenant, bucket, "about")))

    async def drop(self, tenant: str, bucket: str, now_ms: int) -> bool:
        """Remove a bucket without objects and versions, with its unfinished uploads; whether it had none."""
        async with metadata_errors():
            dropped = -1
            while dropped < 0:
                uploads = cast(list[bytes], await self._client.hkeys(_of(tenant, bucket, "uploads")))
                names = [
                    "objects",
                    "uploads",
                    "about",
                    "garbage",
                    "charged",
                    "waste",
                    "stored",
                    "versions",
                    "settings",
                    "sequence",
                    *(f"parts:{upload.decode()}" for upload in uploads),
                ]
                keys = [_of(tenant, bucket, name) for name in names]
                dropped = int(await self._drop(keys=keys, args=[len(uploads), now_ms]))
            if dropped:
                await self._client.hdel(_buckets(tenant), bucket)
        return bool(dropped)

    async def all(self, tenant: str) -> list[tuple[str, float]]:
        """Names and times of creation, in order."""
        async with metadata_errors():
            rows = cast(dict[bytes, bytes], await self._client.hgetall(_buckets(tenant)))
        return sorted((name.decode(), float(cbor2.loads(raw))) for name, raw in rows.items())

    async def everywhere(self) -> list[tuple[str, str]]:
        """(tenant, bucket) of all; for the sweep."""
        async with metadata_errors():
            rows = cast(set[bytes], await self._client.smembers(_PLACES))
        places = [place.decode().split("/", 1) for place in rows]
        return [(tenant, bucket) for tenant, bucket in places]

    async def settings(self, tenant: str, bucket: str) -> dict[str, bytes]:
        """Return a bucket's settings by name; empty too if it is not there."""
        async with metadata_errors():
            rows = cast(dict[bytes, bytes], await self._client.hgetall(_of(tenant, bucket, "settings")))
        return {name.decode(): value for name, value in rows.items()}

    async def setting(self, tenant: str, bucket: str, name: str) -> bytes | None:
        """Return one setting; None if it is not set, or the bucket is not there."""
        async with metadata_errors():
            return cast("bytes | None", await self._client.hget(_of(tenant, bucket, "settings"), name))

    async def set(self, tenant: str, bucket: str, name: str, value: bytes) -> bool:
        """Set a setting, an empty value for none; whether the bucket is there. See `ports.Buckets`."""
        keys = [_of(tenant, bucket, part) for part in ("about", "settings")]
        async with metadata_errors():
            return bool(await self._set(keys=keys, args=[name, value]))

    async def stored_bytes(self, tenant: str) -> int:
        """Return a tenant's charge in bytes.

        It counts objects, their older versions, parts and unremoved blobs, and `ENTRY_BYTES` for each object, version,
        delete marker, part, upload and bucket.
        """
        async with metadata_errors():
            buckets = cast(list[bytes], await self._client.hkeys(_buckets(tenant)))
            pipeline = self._client.pipeline(transaction=False)
            for bucket in buckets:
                pipeline.get(_of(tenant, bucket.decode(), "charged"))
            counts: list[bytes | None] = await pipeline.execute() if buckets else []
            for at, bucket in enumerate(buckets):
                if counts[at] is None:  # as an earlier release left it
                    keys = [_of(tenant, bucket.decode(), name) for name in ("charged", "objects")]
                    counts[at] = await self._charge(keys=keys)
        return ENTRY_BYTES * len(buckets) + sum(max(0, int(count)) for count in counts if count)

    # ---- objects

    async def put(self, tenant: str, bucket: str, entry: StoredObject, expected: str, now_ms: int) -> Commit:
        """Store an object under its key. If this raises, it may be stored or not.

        Args:
            tenant: Name of the tenant.
            bucket: Name of the bucket.
            entry: The object.
            expected: State of the key that it requires: "" for any, "absent", or an ETag.
            now_ms: Time, Unix epoch.
        """
        blobs = " ".join(blob.name for blob in entry.blobs)
        keys = [_of(tenant, bucket, name) for name in _VERSIONED]
        args: list[bytes | str | int] = [entry.key.encode(), pack(entry), expected, now_ms + GRACE_MS, blobs, _random()]
        async with metadata_errors():
            outcome, version_id = cast(tuple[int, bytes], await self._put(keys=keys, args=args))
        return Commit(CommitOutcome(outcome), version_id.decode())

    async def get(self, tenant: str, bucket: str, key: str, version_id: str = "") -> StoredObject | None:
        """Return an object, or a version of it. See `ports.Buckets`."""
        raw = await self._raw(tenant, bucket, key, version_id)
        return unpack(key, raw) if raw else None

    async def _raw(self, tenant: str, bucket: str, key: str, version_id: str) -> bytes | None:
        async with metadata_errors():
            raw = cast(bytes | None, await self._client.hget(_of(tenant, bucket, "objects"), key))
            if raw is not None and version_id in ("", place_of(raw).id):
                return raw
            # Versions move between the hashes: the rest is one step, which looks at the current one again.
            keys = [_of(tenant, bucket, name) for name in ("objects", "versions", "archive")]
            return cast(bytes | None, await self._get(keys=keys, args=[key.encode(), version_id]))

    async def delete(
        self,
        tenant: str,
        bucket: str,
        key: str,
        now_ms: int,
        etag: str = "",
        unchanged: StoredObject | None = None,
    ) -> Deletion:
        """Delete an object; with versioning it becomes an older version. See `ports.Buckets`."""
        keys = [_of(tenant, bucket, name) for name in _VERSIONED]
        marker = pack(StoredObject(key, "", size=0, modified_s=now_ms / 1e3, blobs=()))
        args: list[bytes | str | int] = [key.encode(), now_ms + GRACE_MS, etag, marker, _random()]
        args.append(pack(unchanged) if unchanged is not None else "")
        async with metadata_errors():
            outcome, version_id = cast(tuple[int, bytes], await self._delete(keys=keys, args=args))
        return Deletion(DeleteOutcome(outcome), version_id.decode(), is_marker=bool(version_id))

    async def delete_version(
        self,
        tenant: str,
        bucket: str,
        key: str,
        version_id: str,
        now_ms: int,
        unchanged: StoredObject | None = None,
        older: bool = False,
    ) -> Deletion:
        """Delete a version for good. See `ports.Buckets`."""
        keys = [_of(tenant, bucket, name) for name in _VERSIONED]
        args: list[bytes | str | int] = [key.encode(), version_id, now_ms + GRACE_MS]
        args += [pack(unchanged) if unchanged is not None else "", int(older)]
        async with metadata_errors():
            outcome, is_marker = cast(tuple[int, int], await self._delete_version(keys=keys, args=args))
        return Deletion(DeleteOutcome(outcome), version_id, bool(is_marker))

    async def tag(self, tenant: str, bucket: str, key: str, version_id: str, tags: Mapping[str, str]) -> bool:
        """Replace the tags of an object, or of a version of it; whether it is there."""
        keys = [_of(tenant, bucket, name) for name in ("objects", "versions")]
        while (raw := await self._raw(tenant, bucket, key, version_id)) is not None:
            tagged = with_place_of(raw, pack(replace(unpack(key, raw), tags=tags)))
            async with metadata_errors():
                if await self._replace(keys=keys, args=[key.encode(), place_of(raw).id, raw, tagged]):
                    return True
        return False

    async def versions(
        self, tenant: str, bucket: str, prefix: str, marker: str, version_id: str, past: bool, limit: int
    ) -> VersionsPage:
        """Return versions of objects whose keys begin with `prefix`. See `ports.Buckets`."""
        inside = b""  # of the marker's key: the version after which the page begins
        if version_id and not past and marker.startswith(prefix):
            raw = await self._raw(tenant, bucket, marker, version_id)
            place = place_of(raw) if raw is not None else None
            inside = f"{marker}\0{place.order} {place.id}".encode() if place is not None else b""
        low = b"[" + prefix.encode()
        if marker and (marker >= prefix or past):
            low = b"(" + marker.encode() + (b"\xff" if past else b"")
        low_archive = low if low[:1] == b"[" or past else low + b"\0\xff"
        if inside:
            low_archive = b"(" + inside
        high = b"(" + prefix.encode() + b"\xff" if prefix else b"+"
        async with metadata_errors():
            ranges = [
                cast(list[bytes], await self._client.zrange(name, start, high, bylex=True, offset=0, num=limit))
                for name, start in (
                    (_of(tenant, bucket, "keys"), low),
                    (_of(tenant, bucket, "archive"), low_archive),
                )
            ]
            members = sorted(
                [(key, b"") for key in ranges[0]]
                + [(place.partition(b"\0")[0], place.partition(b"\0")[2]) for place in ranges[1]]
            )[:limit]
            keys = [key for key, place in members if not place]
            fields = [key + b"\0" + place.rpartition(b" ")[2] for key, place in members if place]
            raws: dict[tuple[bytes, bytes], bytes | None] = {}
            if keys:
                of_keys = cast(list[bytes | None], await self._client.hmget(_of(tenant, bucket, "objects"), keys))
                raws |= dict(zip([member for member in members if not member[1]], of_keys, strict=True))
            if fields:
                archived = cast(list[bytes | None], await self._client.hmget(_of(tenant, bucket, "versions"), fields))
                raws |= dict(zip([member for member in members if member[1]], archived, strict=True))
        versions, latest, previous = [], [], marker.encode() if inside else b""
        for member in members:
            if raw := raws[member]:
                versions.append(unpack(member[0].decode(), raw))
                latest.append(member[0] != previous)
                previous = member[0]
        return VersionsPage(versions, latest, truncated=len(members) >= limit)

    async def page(
        self, tenant: str, bucket: str, prefix: str, marker: str, past: bool, limit: int, delimiter: str = ""
    ) -> Page:
        """Up to `limit` objects whose keys begin with `prefix`, in order of their bytes, from after `marker`.

        `past`: after all keys that begin with `marker`, too. Fewer than there are if some are deleted at this moment.
        The page ends at the first key with the `delimiter` behind the prefix; nothing but its name is read.
        """
        low = b"[" + prefix.encode()
        if marker and (marker >= prefix or past):
            low = b"(" + marker.encode() + (b"\xff" if past else b"")
        high = b"(" + prefix.encode() + b"\xff" if prefix else b"+"
        names, objects = _of(tenant, bucket, "keys"), _of(tenant, bucket, "objects")
        async with metadata_errors():
            every = cast(list[bytes], await self._client.zrange(names, low, high, bylex=True, offset=0, num=limit))
            keys = every[: _first_with(delimiter.encode(), every, len(prefix.encode()))]
            raws = cast(
                list[bytes | None],
                await self._client.hmget(objects, keys) if keys else [],
            )
        entries = [unpack(key.decode(), raw) for key, raw in zip(keys, raws, strict=True) if raw]
        common = every[len(keys)].decode() if len(keys) < len(every) else ""
        return Page(entries, every[-1].decode() if every else "", more=len(every) >= limit, common=common)

    # ---- blobs

    async def will_write(self, tenant: str, bucket: str, blob: str, now_ms: int) -> bool:
        """Before a blob is written. Whether the bucket is there."""
        keys = [_of(tenant, bucket, "about"), _of(tenant, bucket, "garbage")]
        async with metadata_errors():
            return bool(await self._will_write(keys=keys, args=[blob, now_ms + UNCOMMITTED_MS]))

    async def garbage(self, tenant: str, bucket: str, now_ms: int, limit: int) -> list[str]:
        """Return blobs that may be deleted."""
        async with metadata_errors():
            rows = await self._client.zrangebyscore(_of(tenant, bucket, "garbage"), "-inf", now_ms, start=0, num=limit)
        return [blob.decode() for blob in cast(list[bytes], rows)]

    async def abandon(self, tenant: str, bucket: str, blobs: Sequence[str], now_ms: int) -> None:
        """Nothing refers to these, nothing reads them."""
        if blobs:
            async with metadata_errors():
                await self._client.zadd(_of(tenant, bucket, "garbage"), dict.fromkeys(blobs, now_ms))

    async def removed(self, tenant: str, bucket: str, blobs: Sequence[str]) -> None:
        """Forget removed blobs, and end their charge."""
        keys = [_of(tenant, bucket, name) for name in ("garbage", "waste", "charged")]
        if blobs:
            async with metadata_errors():
                await self._removed(keys=keys, args=list(blobs))

    # ---- multipart uploads

    async def start_upload(self, tenant: str, bucket: str, upload: MultipartUpload) -> bool:
        """Whether the bucket is there."""
        keys = [_of(tenant, bucket, name) for name in ("uploads", "about", "objects", "charged")]
        async with metadata_errors():
            return bool(await self._start_upload(keys=keys, args=[upload.upload_id, pack_upload(upload)]))

    async def upload(self, tenant: str, bucket: str, upload_id: str) -> MultipartUpload | None:
        async with metadata_errors():
            raw = cast(bytes | None, await self._client.hget(_of(tenant, bucket, "uploads"), upload_id))
        return unpack_upload(upload_id, raw) if raw is not None else None

    async def uploads(self, tenant: str, bucket: str) -> list[MultipartUpload]:
        """Return them in order of key and time."""
        async with metadata_errors():
            rows = cast(dict[bytes, bytes], await self._client.hgetall(_of(tenant, bucket, "uploads")))
        uploads = [unpack_upload(upload_id.decode(), raw) for upload_id, raw in rows.items()]
        return sorted(uploads, key=lambda upload: (upload.key, upload.started_s))

    async def stale_uploads(self, tenant: str, bucket: str, before_s: float) -> list[str]:
        """Return the ids of uploads that were begun before a time (seconds since the Unix epoch)."""
        stale = []
        async with metadata_errors():
            async for upload_id, raw in self._client.hscan_iter(_of(tenant, bucket, "uploads"), count=_UPLOADS_AT_ONCE):
                if unpack_upload("", raw).started_s < before_s:
                    stale.append(upload_id.decode())
        return stale

    async def put_part(self, tenant: str, bucket: str, upload_id: str, part: UploadPart, now_ms: int) -> CommitOutcome:
        """Store a part; an earlier one with this number becomes garbage."""
        names = ("uploads", f"parts:{upload_id}", "garbage", "objects", "charged", "waste")
        keys = [_of(tenant, bucket, name) for name in names]
        blobs = " ".join(blob.name for blob in part.blobs)
        args: list[bytes | str | int] = [upload_id, str(part.number), pack_part(part), now_ms + GRACE_MS, blobs]
        async with metadata_errors():
            return CommitOutcome(await self._put_part(keys=keys, args=args))

    async def parts(self, tenant: str, bucket: str, upload_id: str) -> dict[int, UploadPart]:
        async with metadata_errors():
            rows = cast(dict[bytes, bytes], await self._client.hgetall(_of(tenant, bucket, f"parts:{upload_id}")))
        return {int(number): unpack_part(int(number), raw) for number, raw in rows.items()}

    async def complete(
        self,
        tenant: str,
        bucket: str,
        upload_id: str,
        entry: StoredObject,
        parts: Sequence[UploadPart],
        expected: str,
        now_ms: int,
    ) -> Commit:
        """Store the object that parts make, and end the upload. See `put`."""
        names = (*_VERSIONED, "uploads", f"parts:{upload_id}", f"completed:{upload_id}")
        args: list[bytes | str | int] = [entry.key.encode(), pack(entry), expected, now_ms + GRACE_MS, upload_id]
        args += [COMPLETED_MS, _random()]
        for part in parts:
            args += [str(part.number), pack_part(part)]
        async with metadata_errors():
            keys = [_of(tenant, bucket, name) for name in names]
            outcome, version_id = cast(tuple[int, bytes], await self._complete(keys=keys, args=args))
        return Commit(CommitOutcome(outcome), version_id.decode())

    async def completed(self, tenant: str, bucket: str, upload_id: str) -> tuple[str, str] | None:
        """Key and ETag of the object that an upload became lately."""
        async with metadata_errors():
            raw = cast(bytes | None, await self._client.get(_of(tenant, bucket, f"completed:{upload_id}")))
        if raw is None:
            return None
        etag, _, key = raw.decode().partition("\n")
        return key, etag

    async def abort(self, tenant: str, bucket: str, upload_id: str, now_ms: int) -> bool:
        """Forget an upload, its parts are garbage; whether it was there."""
        names = ("uploads", f"parts:{upload_id}", "garbage", "objects", "charged", "waste")
        keys = [_of(tenant, bucket, name) for name in names]
        async with metadata_errors():
            return bool(await self._abort(keys=keys, args=[upload_id, now_ms]))

    async def forget_place(self, tenant: str, bucket: str) -> None:
        """Forget the place if the bucket is deleted and has no garbage: the sweep need not look there."""
        async with metadata_errors():
            remains = await self._client.exists(_of(tenant, bucket, "about"), _of(tenant, bucket, "garbage"))
            if not remains:
                await self._client.srem(_PLACES, f"{tenant}/{bucket}")


def _first_with(delimiter: bytes, keys: Sequence[bytes], start: int) -> int:
    """Return how many keys come before the first that has the delimiter from byte `start` on."""
    places = (at for at, key in enumerate(keys) if delimiter and key.find(delimiter, start) >= 0)
    return next(places, len(keys))


_UPLOADS_AT_ONCE: Final = 100
_VERSIONED: Final = (
    "objects", "keys", "garbage", "about", "charged", "waste", "settings", "versions", "archive", "sequence",
)  # fmt: skip
"""Keys of the scripts that make or end versions of objects, in their order."""
_PLACES = "quire:s3:places"


def _random() -> str:
    """Return the end of a version's id: ids cannot be guessed, and are not used again in another bucket."""
    return secrets.token_hex(9)


def _buckets(tenant: str) -> str:
    return f"quire:s3:{tenant}:buckets"


def _of(tenant: str, bucket: str, part: str) -> str:
    """All of a bucket is in one slot of a Redis cluster but for the tenant's list of buckets."""
    return f"quire:s3:{{{tenant}/{bucket}}}:{part}"
