"""Buckets and the objects in them, for the S3 door: names, what is known of each, and which bytes they are.

Buckets belong to a tenant, and a name is a tenant's own: nobody sees or can tell another's. An object is a list of
blobs in the object tier. A blob that nothing refers to (any more) stands in the bucket's list of garbage, with the time
from which on it may go: it is put there before it is written, and taken out when an object refers to it, so that
nothing that dies half-way leaves bytes behind for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import cbor2
import redis.asyncio as redis

from quire.metadata.connection import metadata_errors

GRACE_MS: Final = 300_000  # a reader may still be at a blob that was replaced
UNCOMMITTED_MS: Final = 86_400_000

# KEYS: objects, keys, garbage, about. ARGV: 1 key, 2 etag, 3 packed, 4 "" | "absent" | etag that must be there, 5 when
# the old blobs may go, 6 the new blobs, concatenated with ' '. Returns 1, 0 for another etag, -1 for no such bucket.
_PUT = """
if redis.call('EXISTS', KEYS[4]) == 0 then return -1 end
local before = redis.call('HGET', KEYS[1], ARGV[1])
local etag = before and string.match(before, '^[^\\n]*') or ''
if ARGV[4] == 'absent' and before then return 0 end
if ARGV[4] ~= '' and ARGV[4] ~= 'absent' and etag ~= ARGV[4] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('ZADD', KEYS[2], 0, ARGV[1])
if before then
    for blob in string.gmatch(string.match(before, '^[^\\n]*\\n([^\\n]*)'), '%S+') do
        redis.call('ZADD', KEYS[3], ARGV[5], blob)
    end
end
for blob in string.gmatch(ARGV[6], '%S+') do redis.call('ZREM', KEYS[3], blob) end
return 1
"""
# KEYS: objects, keys, garbage. ARGV: 1 key, 2 when its blobs may go, 3 "" or the etag it must have. Returns 1, 0 if
# there is none, -1 for another etag.
_DELETE = """
local before = redis.call('HGET', KEYS[1], ARGV[1])
if not before then return 0 end
if ARGV[3] ~= '' and string.match(before, '^[^\\n]*') ~= ARGV[3] then return -1 end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
for blob in string.gmatch(string.match(before, '^[^\\n]*\\n([^\\n]*)'), '%S+') do
    redis.call('ZADD', KEYS[3], ARGV[2], blob)
end
return 1
"""
# KEYS: objects, uploads, about. Removes an empty bucket: 1, 0 if it is not empty.
_DROP = """
if redis.call('HLEN', KEYS[1]) > 0 or redis.call('HLEN', KEYS[2]) > 0 then return 0 end
redis.call('DEL', KEYS[3])
return 1
"""


@dataclass(frozen=True, slots=True)
class Blob:
    """So many bytes in the object tier."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What a bucket has under a key. `etag` without quotes; `headers` and `metadata` as the client gave them.

    `checksums` by algorithm, base64, of the whole object; empty where they are not known.
    """

    key: str
    etag: str
    size: int
    modified_s: float
    blobs: tuple[Blob, ...]
    headers: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload that is under way."""

    key: str
    upload_id: str
    started_s: float
    headers: Mapping[str, str]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of it."""

    number: int
    etag: str
    size: int
    modified_s: float
    blobs: tuple[Blob, ...]


class Buckets:
    """Of all tenants. Every method is one or two round trips."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._put = client.register_script(_PUT)
        self._delete = client.register_script(_DELETE)
        self._drop = client.register_script(_DROP)

    # ---- buckets

    async def create(self, tenant: str, bucket: str, created_s: float) -> bool:
        """Whether it is new."""
        async with metadata_errors():
            new = await self._client.set(_of(tenant, bucket, "about"), cbor2.dumps(created_s), nx=True)
            await self._client.hsetnx(_buckets(tenant), bucket, cbor2.dumps(created_s))
        return bool(new)

    async def exists(self, tenant: str, bucket: str) -> bool:
        async with metadata_errors():
            return bool(await self._client.exists(_of(tenant, bucket, "about")))

    async def drop(self, tenant: str, bucket: str) -> bool:
        """Remove an empty bucket; whether it was empty."""
        async with metadata_errors():
            dropped = await self._drop(keys=[_of(tenant, bucket, name) for name in ("objects", "uploads", "about")])
            if dropped:
                await self._client.hdel(_buckets(tenant), bucket)
        return bool(dropped)

    async def all(self, tenant: str) -> list[tuple[str, float]]:
        """Names and times of creation, in order."""
        async with metadata_errors():
            found = cast(dict[bytes, bytes], await self._client.hgetall(_buckets(tenant)))
        return sorted((name.decode(), float(cbor2.loads(raw))) for name, raw in found.items())

    async def everywhere(self) -> list[tuple[str, str]]:
        """(tenant, bucket) of all; for who tidies up."""
        async with metadata_errors():
            found = cast(set[bytes], await self._client.smembers(_PLACES))
        places = [place.decode().split("/", 1) for place in found]
        return [(tenant, bucket) for tenant, bucket in places]

    # ---- objects

    async def put(self, tenant: str, bucket: str, entry: StoredObject, expected: str, now_ms: int) -> int:
        """Let the key be this. `expected`: "" for whatever is there, "absent", or the ETag it has.

        1 if it is so, 0 if something else was there, -1 for no such bucket.
        """
        blobs = " ".join(blob.name for blob in entry.blobs)
        keys = [_of(tenant, bucket, name) for name in ("objects", "keys", "garbage", "about")]
        args: list[bytes | str | int] = [
            entry.key.encode(),
            entry.etag,
            _pack(entry),
            expected,
            now_ms + GRACE_MS,
            blobs,
        ]
        async with metadata_errors():
            return int(await self._put(keys=keys, args=args))

    async def get(self, tenant: str, bucket: str, key: str) -> StoredObject | None:
        async with metadata_errors():
            raw = cast(bytes | None, await self._client.hget(_of(tenant, bucket, "objects"), key))
        return _unpack(key, raw) if raw else None

    async def delete(self, tenant: str, bucket: str, key: str, now_ms: int, etag: str = "") -> int:
        """1 if it is gone, 0 if it was not there, -1 if it has another ETag than `etag`."""
        keys = [_of(tenant, bucket, name) for name in ("objects", "keys", "garbage")]
        async with metadata_errors():
            return int(await self._delete(keys=keys, args=[key.encode(), now_ms + GRACE_MS, etag]))

    async def page(
        self, tenant: str, bucket: str, prefix: str, after: str, past: bool, limit: int
    ) -> list[StoredObject]:
        """Up to `limit` objects whose keys begin with `prefix`, in order of their bytes, from after `after`.

        `past`: after all keys that begin with `after`, too.
        """
        low = b"[" + prefix.encode()
        if after and (after >= prefix or past):
            low = b"(" + after.encode() + (b"\xff" if past else b"")
        high = b"(" + prefix.encode() + b"\xff" if prefix else b"+"
        async with metadata_errors():
            keys = cast(
                list[bytes],
                await self._client.zrange(
                    _of(tenant, bucket, "keys"),
                    low,
                    high,
                    bylex=True,
                    offset=0,
                    num=limit,
                ),
            )
            raws = cast(
                list[bytes | None],
                await self._client.hmget(_of(tenant, bucket, "objects"), keys) if keys else [],
            )
        return [_unpack(key.decode(), raw) for key, raw in zip(keys, raws, strict=True) if raw]

    # ---- blobs

    async def will_write(self, tenant: str, bucket: str, blob: str, now_ms: int) -> bool:
        """Before a blob is written. Whether the bucket is there."""
        async with metadata_errors(), self._client.pipeline(transaction=False) as pipe:
            pipe.exists(_of(tenant, bucket, "about"))
            pipe.zadd(_of(tenant, bucket, "garbage"), {blob: now_ms + UNCOMMITTED_MS})
            pipe.sadd(_PLACES, f"{tenant}/{bucket}")
            there, *_ = await pipe.execute()
        return bool(there)

    async def garbage(self, tenant: str, bucket: str, now_ms: int, limit: int) -> list[str]:
        """Blobs that may go."""
        async with metadata_errors():
            found = await self._client.zrangebyscore(_of(tenant, bucket, "garbage"), "-inf", now_ms, start=0, num=limit)
        return [blob.decode() for blob in cast(list[bytes], found)]

    async def abandon(self, tenant: str, bucket: str, blobs: Sequence[str], now_ms: int) -> None:
        """Nothing will refer to these; nobody reads them either."""
        if blobs:
            async with metadata_errors():
                await self._client.zadd(_of(tenant, bucket, "garbage"), dict.fromkeys(blobs, now_ms))

    async def removed(self, tenant: str, bucket: str, blobs: Sequence[str]) -> None:
        if blobs:
            async with metadata_errors():
                await self._client.zrem(_of(tenant, bucket, "garbage"), *blobs)

    # ---- multipart uploads

    async def start_upload(self, tenant: str, bucket: str, upload: Upload) -> None:
        raw = cbor2.dumps([upload.key, upload.started_s, dict(upload.headers), dict(upload.metadata)])
        async with metadata_errors():
            await self._client.hset(_of(tenant, bucket, "uploads"), upload.upload_id, raw)

    async def upload(self, tenant: str, bucket: str, upload_id: str) -> Upload | None:
        async with metadata_errors():
            raw = cast(bytes | None, await self._client.hget(_of(tenant, bucket, "uploads"), upload_id))
        if raw is None:
            return None
        key, started_s, headers, metadata = cbor2.loads(raw)
        return Upload(key, upload_id, started_s, headers, metadata)

    async def uploads(self, tenant: str, bucket: str) -> list[Upload]:
        """In order of key and time."""
        async with metadata_errors():
            found = cast(dict[bytes, bytes], await self._client.hgetall(_of(tenant, bucket, "uploads")))
        uploads = []
        for upload_id, raw in found.items():
            key, started_s, headers, metadata = cbor2.loads(raw)
            uploads.append(Upload(key, upload_id.decode(), started_s, headers, metadata))
        return sorted(uploads, key=lambda each: (each.key, each.started_s))

    async def put_part(self, tenant: str, bucket: str, upload_id: str, part: Part, now_ms: int) -> bool:
        """Whether the upload is still under way. A part of that number before is garbage."""
        name = _of(tenant, bucket, f"parts:{upload_id}")
        raw = cbor2.dumps([part.etag, part.size, part.modified_s, [[blob.name, blob.size] for blob in part.blobs]])
        async with metadata_errors(), self._client.pipeline() as pipe:
            pipe.hget(name, str(part.number))
            pipe.hset(name, str(part.number), raw)
            pipe.hexists(_of(tenant, bucket, "uploads"), upload_id)
            if part.blobs:
                pipe.zrem(_of(tenant, bucket, "garbage"), *(blob.name for blob in part.blobs))
            before, _, there, *_ = await pipe.execute()
        if not there:
            await self.end_upload(tenant, bucket, upload_id, now_ms)
            return False
        if before:
            await self.abandon(tenant, bucket, [name for name, _ in cbor2.loads(before)[3]], now_ms + GRACE_MS)
        return True

    async def parts(self, tenant: str, bucket: str, upload_id: str) -> dict[int, Part]:
        async with metadata_errors():
            found = cast(dict[bytes, bytes], await self._client.hgetall(_of(tenant, bucket, f"parts:{upload_id}")))
        parts = {}
        for number, raw in found.items():
            etag, size, modified_s, blobs = cbor2.loads(raw)
            made = tuple(Blob(name, length) for name, length in blobs)
            parts[int(number)] = Part(int(number), etag, size, modified_s, made)
        return parts

    async def end_upload(self, tenant: str, bucket: str, upload_id: str, now_ms: int, kept: Sequence[str] = ()) -> bool:
        """Forget an upload; its parts are garbage but for the blobs that were `kept`. Whether it was there."""
        parts = await self.parts(tenant, bucket, upload_id)
        gone = {blob.name for part in parts.values() for blob in part.blobs} - set(kept)
        async with metadata_errors(), self._client.pipeline() as pipe:
            pipe.hdel(_of(tenant, bucket, "uploads"), upload_id)
            pipe.delete(_of(tenant, bucket, f"parts:{upload_id}"))
            if gone:
                pipe.zadd(_of(tenant, bucket, "garbage"), dict.fromkeys(gone, now_ms))
            there, *_ = await pipe.execute()
        return bool(there)


_PLACES = "quire:s3:places"


def _buckets(tenant: str) -> str:
    return f"quire:s3:{tenant}:buckets"


def _of(tenant: str, bucket: str, what: str) -> str:
    """All of a bucket is in one slot of a Redis cluster but for the tenant's list of buckets."""
    return f"quire:s3:{{{tenant}/{bucket}}}:{what}"


def _pack(entry: StoredObject) -> bytes:
    """ETag and blobs in lines of their own, for the scripts."""
    rest = cbor2.dumps(
        [
            entry.size,
            entry.modified_s,
            [blob.size for blob in entry.blobs],
            dict(entry.headers),
            dict(entry.metadata),
            dict(entry.checksums),
        ]
    )
    return f"{entry.etag}\n{' '.join(blob.name for blob in entry.blobs)}\n".encode() + rest


def _unpack(key: str, raw: bytes) -> StoredObject:
    etag, names, rest = raw.split(b"\n", 2)
    size, modified_s, sizes, headers, metadata, checksums = cbor2.loads(rest)
    blobs = tuple(Blob(name.decode(), length) for name, length in zip(names.split(), sizes, strict=True))
    return StoredObject(key, etag.decode(), size, modified_s, blobs, headers, metadata, checksums)
