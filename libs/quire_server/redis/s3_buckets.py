"""Buckets and the objects in them, in Redis. What they are stands in `quire.model.buckets`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import cbor2
import redis.asyncio as redis

from quire.model.buckets import COMPLETED_MS, GRACE_MS, UNCOMMITTED_MS, Page, Part, StoredObject, Upload
from quire.model.policy import ENTRY_BYTES
from quire_server.redis.cbor import UINT
from quire_server.redis.connection import metadata_errors
from quire_server.redis.packed_objects import pack, pack_part, unpack, unpack_part

# Entries and parts are "etag\nblob blob ...\nCBOR", so that scripts see the ETag and the blobs; the CBOR is a list that
# begins with the size. `charged` counts a bucket's objects, parts and uploads, and blobs that nothing refers to until
# they are removed: their sizes are in the hash `waste`. Releases before 0.3 counted otherwise, in `stored`.
_COMMON = (
    UINT
    + f"local ENTRY = {ENTRY_BYTES}\n"
    + """
local function size_of(raw) return uint(raw, select(2, string.find(raw, '^[^\\n]*\\n[^\\n]*\\n')) + 2) end
local function sum_of(hash, part)
    local cursor, sum = '0', 0
    repeat
        local page = redis.call('HSCAN', hash, cursor, 'COUNT', 1000)
        cursor = page[1]
        for at = 1, #page[2], 2 do sum = sum + part(page[2][at], page[2][at + 1]) end
    until cursor == '0'
    return sum
end
local function count(charged, objects, more)
    if redis.call('EXISTS', charged) == 0 then
        local bucket = string.sub(objects, 1, -1 - #'objects') -- the other keys are in its slot
        local function entry(_, raw) return ENTRY + size_of(raw) end
        local function unremoved(blob, size) -- releases before 0.3 remove blobs without their waste
            return redis.call('ZSCORE', bucket .. 'garbage', blob) and tonumber(size) or 0
        end
        local sum = sum_of(objects, entry) + sum_of(bucket .. 'waste', unremoved)
            + sum_of(bucket .. 'uploads', function(id) return ENTRY + sum_of(bucket .. 'parts:' .. id, entry) end)
        redis.call('SET', charged, string.format('%.0f', sum))
    end
    if more ~= 0 then redis.call('INCRBY', charged, string.format('%.0f', more)) end -- Lua prints -0 as "-0"
end
local function etag_of(raw) return string.match(raw, '^[^\\n]*') end
local function discard(garbage, waste, raw, at)
    local names, size = string.match(raw, '^[^\\n]*\\n([^\\n]*)'), size_of(raw)
    local count = select(2, string.gsub(names, '%S+', ''))
    for blob in string.gmatch(names, '%S+') do
        redis.call('ZADD', garbage, at + 10000 * count, blob)
        if size > 0 then redis.call('HSET', waste, blob, string.format('%.0f', size)) end
        size = 0 -- the first blob stands for all
    end
end
local function store(objects, keys, garbage, waste, charged, key, packed, grace)
    local before = redis.call('HGET', objects, key)
    count(charged, objects, size_of(packed) + (before and 0 or ENTRY))
    redis.call('HSET', objects, key, packed)
    redis.call('ZADD', keys, 0, key)
    if before then discard(garbage, waste, before, grace) end
end
local function fits(objects, key, expected)
    local before = redis.call('HGET', objects, key)
    if expected == 'absent' then return not before end
    return expected == '' or (before and etag_of(before) == expected)
end
"""
)
# KEYS: objects, keys, garbage, about, charged, waste. ARGV: 1 key, 2 packed, 3 "" | "absent" | etag that must be there,
# 4 when the old blobs may be removed, 5 the new blobs, separated by ' '. Returns 1, 0 for another etag, -1 for no such
# bucket, -2 if a blob was removed concurrently.
_PUT = (
    _COMMON
    + """
if redis.call('EXISTS', KEYS[4]) == 0 then return -1 end
if not fits(KEYS[1], ARGV[1], ARGV[3]) then return 0 end
for blob in string.gmatch(ARGV[5], '%S+') do
    if not redis.call('ZSCORE', KEYS[3], blob) then return -2 end
end
store(KEYS[1], KEYS[2], KEYS[3], KEYS[6], KEYS[5], ARGV[1], ARGV[2], tonumber(ARGV[4]))
for blob in string.gmatch(ARGV[5], '%S+') do redis.call('ZREM', KEYS[3], blob) end
return 1
"""
)
# KEYS: objects, keys, garbage, charged, waste. ARGV: 1 key, 2 when its blobs may be removed, 3 "" or the etag it must
# have. Returns 1, 0 if there is none, -1 for another etag.
_DELETE = (
    _COMMON
    + """
local before = redis.call('HGET', KEYS[1], ARGV[1])
if not before then return 0 end
if ARGV[3] ~= '' and etag_of(before) ~= ARGV[3] then return -1 end
count(KEYS[4], KEYS[1], -ENTRY)
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
discard(KEYS[3], KEYS[5], before, tonumber(ARGV[2]))
return 1
"""
)
# KEYS: uploads, parts, garbage, objects, charged, waste. ARGV: 1 upload, 2 number, 3 packed, 4 when an old part's blobs
# may be removed, 5 the new blobs. Returns 1, 0 if there is no such upload, -2 if a blob was removed concurrently.
_PUT_PART = (
    _COMMON
    + """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
for blob in string.gmatch(ARGV[5], '%S+') do
    if not redis.call('ZSCORE', KEYS[3], blob) then return -2 end
end
local before = redis.call('HGET', KEYS[2], ARGV[2])
count(KEYS[5], KEYS[4], size_of(ARGV[3]) + (before and 0 or ENTRY))
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
if before then discard(KEYS[3], KEYS[6], before, tonumber(ARGV[4])) end
for blob in string.gmatch(ARGV[5], '%S+') do redis.call('ZREM', KEYS[3], blob) end
return 1
"""
)
# KEYS: objects, keys, garbage, about, uploads, parts, completed, charged, waste. ARGV: 1 key, 2 packed, 3 expected, 4
# when old blobs may be removed, 5 upload, 6 for how many ms it is remembered, then number and packed of each part that
# the object is made of. Returns as _PUT, -3 for no such upload, -4 if a part is another now.
_COMPLETE = (
    _COMMON
    + """
if redis.call('EXISTS', KEYS[4]) == 0 then return -1 end
if redis.call('HEXISTS', KEYS[5], ARGV[5]) == 0 then return -3 end
if not fits(KEYS[1], ARGV[1], ARGV[3]) then return 0 end
local chosen = {}
for at = 7, #ARGV, 2 do
    if redis.call('HGET', KEYS[6], ARGV[at]) ~= ARGV[at + 1] then return -4 end
    chosen[ARGV[at]] = true
end
count(KEYS[8], KEYS[1], 0)
store(KEYS[1], KEYS[2], KEYS[3], KEYS[9], KEYS[8], ARGV[1], ARGV[2], tonumber(ARGV[4]))
local parts, more = redis.call('HGETALL', KEYS[6]), -ENTRY
for at = 1, #parts, 2 do
    more = more - ENTRY
    if chosen[parts[at]] then
        more = more - size_of(parts[at + 1])
    else
        discard(KEYS[3], KEYS[9], parts[at + 1], tonumber(ARGV[4]))
    end
end
count(KEYS[8], KEYS[1], more)
redis.call('DEL', KEYS[6])
redis.call('HDEL', KEYS[5], ARGV[5])
redis.call('SET', KEYS[7], etag_of(ARGV[2]) .. '\\n' .. ARGV[1], 'PX', ARGV[6])
return 1
"""
)
# KEYS: uploads, parts, garbage, objects, charged, waste. ARGV: 1 upload, 2 when its parts' blobs may be removed.
# Whether it was there.
_ABORT = (
    _COMMON
    + """
local parts = redis.call('HGETALL', KEYS[2])
count(KEYS[5], KEYS[4], -ENTRY * (redis.call('HEXISTS', KEYS[1], ARGV[1]) + #parts / 2))
for at = 1, #parts, 2 do discard(KEYS[3], KEYS[6], parts[at + 1], tonumber(ARGV[2])) end
redis.call('DEL', KEYS[2])
return redis.call('HDEL', KEYS[1], ARGV[1])
"""
)
# KEYS: about, garbage. ARGV: 1 blob, 2 when it may be removed. Whether the bucket is there.
_WILL_WRITE = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
return 1
"""
# KEYS: uploads, about, objects, charged. ARGV: 1 upload, 2 packed. Whether the bucket is there.
_START_UPLOAD = (
    _COMMON
    + """
if redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
count(KEYS[4], KEYS[3], ENTRY)
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""
)
# KEYS: charged, objects. Returns the charge, counted if it was not.
_CHARGE = _COMMON + "count(KEYS[1], KEYS[2], 0) return redis.call('GET', KEYS[1])"
# KEYS: garbage, waste, charged. ARGV: blobs that were removed.
_REMOVED = """
local size = 0
for _, blob in ipairs(ARGV) do
    size = size + (tonumber(redis.call('HGET', KEYS[2], blob)) or 0)
    redis.call('HDEL', KEYS[2], blob)
    redis.call('ZREM', KEYS[1], blob)
end
if size > 0 and redis.call('EXISTS', KEYS[3]) == 1 then redis.call('DECRBY', KEYS[3], string.format('%.0f', size)) end
"""
# KEYS: objects, uploads, about, garbage, charged, waste, stored, parts of each upload. ARGV: 1 how many uploads the
# caller knows of, 2 when their parts' blobs may be removed. Removes a bucket without objects, and its unfinished
# uploads: 1, 0 if it has objects, -1 if it has other uploads by now.
_DROP = (
    _COMMON
    + """
if redis.call('HLEN', KEYS[1]) > 0 then return 0 end
if redis.call('HLEN', KEYS[2]) ~= tonumber(ARGV[1]) then return -1 end
for at = 8, #KEYS do
    local parts = redis.call('HGETALL', KEYS[at])
    for each = 1, #parts, 2 do discard(KEYS[4], KEYS[6], parts[each + 1], tonumber(ARGV[2])) end
    redis.call('DEL', KEYS[at])
end
redis.call('DEL', KEYS[2], KEYS[3], KEYS[5], KEYS[6], KEYS[7])
return 1
"""
)


class S3Buckets:
    """Of all tenants. Every method is one or two round trips."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._put = client.register_script(_PUT)
        self._delete = client.register_script(_DELETE)
        self._drop = client.register_script(_DROP)
        self._put_part = client.register_script(_PUT_PART)
        self._complete = client.register_script(_COMPLETE)
        self._abort = client.register_script(_ABORT)
        self._will_write = client.register_script(_WILL_WRITE)
        self._charge = client.register_script(_CHARGE)
        self._removed = client.register_script(_REMOVED)
        self._start_upload = client.register_script(_START_UPLOAD)

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
        """Remove a bucket that has no objects, with its unfinished uploads; whether it had none."""
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
                    *(f"parts:{each.decode()}" for each in uploads),
                ]
                keys = [_of(tenant, bucket, name) for name in names]
                dropped = int(await self._drop(keys=keys, args=[len(uploads), now_ms]))
            if dropped:
                await self._client.hdel(_buckets(tenant), bucket)
        return bool(dropped)

    async def all(self, tenant: str) -> list[tuple[str, float]]:
        """Names and times of creation, in order."""
        async with metadata_errors():
            found = cast(dict[bytes, bytes], await self._client.hgetall(_buckets(tenant)))
        return sorted((name.decode(), float(cbor2.loads(raw))) for name, raw in found.items())

    async def everywhere(self) -> list[tuple[str, str]]:
        """(tenant, bucket) of all; for the sweep."""
        async with metadata_errors():
            found = cast(set[bytes], await self._client.smembers(_PLACES))
        places = [place.decode().split("/", 1) for place in found]
        return [(tenant, bucket) for tenant, bucket in places]

    async def stored_bytes(self, tenant: str) -> int:
        """Return a tenant's charge: the bytes of its objects, parts and unremoved blobs, and `ENTRY_BYTES` for each
        object, part, upload and bucket.
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

    async def put(self, tenant: str, bucket: str, entry: StoredObject, expected: str, now_ms: int) -> int:
        """Let the key be this. `expected`: "" for whatever is there, "absent", or the ETag it has.

        1 if it is so, 0 if something else was there, -1 for no such bucket, -2 if its blobs are gone: they were not
        committed within a day. If this raises, it may or may not be so.
        """
        blobs = " ".join(blob.name for blob in entry.blobs)
        keys = [_of(tenant, bucket, name) for name in ("objects", "keys", "garbage", "about", "charged", "waste")]
        args: list[bytes | str | int] = [entry.key.encode(), pack(entry), expected, now_ms + GRACE_MS, blobs]
        async with metadata_errors():
            return int(await self._put(keys=keys, args=args))

    async def get(self, tenant: str, bucket: str, key: str) -> StoredObject | None:
        async with metadata_errors():
            raw = cast(bytes | None, await self._client.hget(_of(tenant, bucket, "objects"), key))
        return unpack(key, raw) if raw else None

    async def delete(self, tenant: str, bucket: str, key: str, now_ms: int, etag: str = "") -> int:
        """1 if it is gone, 0 if it was not there, -1 if it has another ETag than `etag`."""
        keys = [_of(tenant, bucket, name) for name in ("objects", "keys", "garbage", "charged", "waste")]
        async with metadata_errors():
            return int(await self._delete(keys=keys, args=[key.encode(), now_ms + GRACE_MS, etag]))

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
        """Blobs that may go."""
        async with metadata_errors():
            found = await self._client.zrangebyscore(_of(tenant, bucket, "garbage"), "-inf", now_ms, start=0, num=limit)
        return [blob.decode() for blob in cast(list[bytes], found)]

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

    async def start_upload(self, tenant: str, bucket: str, upload: Upload) -> bool:
        """Whether the bucket is there."""
        raw = cbor2.dumps([upload.key, upload.started_s, dict(upload.headers), dict(upload.metadata)])
        keys = [_of(tenant, bucket, name) for name in ("uploads", "about", "objects", "charged")]
        async with metadata_errors():
            return bool(await self._start_upload(keys=keys, args=[upload.upload_id, raw]))

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

    async def stale_uploads(self, tenant: str, bucket: str, before_s: float) -> list[str]:
        """Return the ids of uploads that were begun before a time (seconds since the Unix epoch)."""
        stale = []
        async with metadata_errors():
            async for upload_id, raw in self._client.hscan_iter(_of(tenant, bucket, "uploads"), count=_UPLOADS_AT_ONCE):
                _, started_s, *_ = cbor2.loads(raw)
                if started_s < before_s:
                    stale.append(upload_id.decode())
        return stale

    async def put_part(self, tenant: str, bucket: str, upload_id: str, part: Part, now_ms: int) -> int:
        """1; 0 if the upload is not under way (any more), -2 if the part's blobs are gone. One before is garbage."""
        names = ("uploads", f"parts:{upload_id}", "garbage", "objects", "charged", "waste")
        keys = [_of(tenant, bucket, name) for name in names]
        blobs = " ".join(blob.name for blob in part.blobs)
        args: list[bytes | str | int] = [upload_id, str(part.number), pack_part(part), now_ms + GRACE_MS, blobs]
        async with metadata_errors():
            return int(await self._put_part(keys=keys, args=args))

    async def parts(self, tenant: str, bucket: str, upload_id: str) -> dict[int, Part]:
        async with metadata_errors():
            found = cast(dict[bytes, bytes], await self._client.hgetall(_of(tenant, bucket, f"parts:{upload_id}")))
        return {int(number): unpack_part(int(number), raw) for number, raw in found.items()}

    async def complete(
        self,
        tenant: str,
        bucket: str,
        upload_id: str,
        entry: StoredObject,
        parts: Sequence[Part],
        expected: str,
        now_ms: int,
    ) -> int:
        """Let the key be `parts`, and the upload be over: as `put`, -3 for no such upload, -4 if a part changed."""
        of_upload = (f"parts:{upload_id}", f"completed:{upload_id}")
        names = ("objects", "keys", "garbage", "about", "uploads", *of_upload, "charged", "waste")
        args: list[bytes | str | int] = [entry.key.encode(), pack(entry), expected, now_ms + GRACE_MS, upload_id]
        args.append(COMPLETED_MS)
        for part in parts:
            args += [str(part.number), pack_part(part)]
        async with metadata_errors():
            return int(await self._complete(keys=[_of(tenant, bucket, name) for name in names], args=args))

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
        """If there is no such bucket any more, and no garbage of it: the sweep need not look there."""
        async with metadata_errors():
            kept = await self._client.exists(_of(tenant, bucket, "about"), _of(tenant, bucket, "garbage"))
            if not kept:
                await self._client.srem(_PLACES, f"{tenant}/{bucket}")


def _first_with(delimiter: bytes, keys: Sequence[bytes], start: int) -> int:
    """Return how many keys come before the first that has the delimiter from byte `start` on."""
    places = (at for at, key in enumerate(keys) if delimiter and key.find(delimiter, start) >= 0)
    return next(places, len(keys))


_UPLOADS_AT_ONCE: Final = 100
_PLACES = "quire:s3:places"


def _buckets(tenant: str) -> str:
    return f"quire:s3:{tenant}:buckets"


def _of(tenant: str, bucket: str, what: str) -> str:
    """All of a bucket is in one slot of a Redis cluster but for the tenant's list of buckets."""
    return f"quire:s3:{{{tenant}/{bucket}}}:{what}"
