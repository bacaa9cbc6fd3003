"""The catalogue of images: of each tenant by id, in order of ids; and how often each record is used, by all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, cast

import cbor2
import redis.asyncio as redis

from quire.model.errors import ConditionFailed
from quire.model.images import ExpectedImage, ImageEntry
from quire.model.policy import ENTRY_BYTES
from quire_server.redis.cbor import UINT
from quire_server.redis.connection import metadata_errors

_ANYTHING = ExpectedImage()
_FIELDS_AT_FIRST: Final = 7
_OF_BEFORE: Final[list[Any]] = [0, {}, "", b""]
"""Time to live, metadata, provenance and name of the record, of entries that were written before there were these."""
_USES, _UNUSED, _EXPIRES = "quire:{images}:uses", "quire:{images}:unused", "quire:{images}:expires"
_CHARGED = "quire:{images}:charged"
_STORED = "quire:{images}:stored"  # of releases before 0.3

# An entry is a list of CBOR that begins with the record's digest and length. A hash by tenant has the sums of the
# lengths, and of the entries themselves; earlier releases did not keep it.
_COUNT = (
    UINT
    + f"local ENTRY = {ENTRY_BYTES}"
    + """
local function size_of(packed) return uint(packed, 36) + ENTRY end
local function count(stored, tenant, entries, more)
    if redis.call('HEXISTS', stored, tenant) == 0 then
        local cursor, sum = '0', 0
        repeat
            local page = redis.call('HSCAN', entries, cursor, 'COUNT', 1000)
            cursor = page[1]
            for at = 2, #page[2], 2 do sum = sum + size_of(page[2][at]) end
        until cursor == '0'
        redis.call('HSET', stored, tenant, string.format('%.0f', sum))
    end
    if more ~= 0 then redis.call('HINCRBY', stored, tenant, string.format('%.0f', more)) end -- Lua prints -0 as "-0"
end
"""
)

# KEYS: entries, ids, uses, unused, expires, stored. ARGV: 1 id, 2 entry, 3 record's name; of the one before: 4 "1" if
# none must be there, 5 its record's digest ("" any), which a packed entry begins with; 6 tenant and id, 7 when it goes;
# 8 tenant. Returns the entry before, false if there was none, or 0 if that is not so: then the record is unused, unless
# others have it.
_PUT = (
    _COUNT
    + """
local before = redis.call('HGET', KEYS[1], ARGV[1])
if (before and ARGV[4] == '1')
        or (ARGV[5] ~= '' and (not before or string.sub(before, 4, 35) ~= ARGV[5])) then
    if redis.call('HEXISTS', KEYS[3], ARGV[3]) == 0 then redis.call('SADD', KEYS[4], ARGV[3]) end
    return 0
end
count(KEYS[6], ARGV[8], KEYS[1], size_of(ARGV[2]) - (before and size_of(before) or 0))
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], 0, ARGV[1])
redis.call('HINCRBY', KEYS[3], ARGV[3], 1)
redis.call('SREM', KEYS[4], ARGV[3])
if tonumber(ARGV[7]) > 0 then
    redis.call('ZADD', KEYS[5], ARGV[7], ARGV[6])
else
    redis.call('ZREM', KEYS[5], ARGV[6])
end
return before
"""
)
# KEYS: entries, ids, expires, stored. ARGV: 1 id, 2 the entry that is meant (empty: any), 3 tenant and id, 4 tenant.
# Returns the entry, or false.
_DELETE = (
    _COUNT
    + """
local before = redis.call('HGET', KEYS[1], ARGV[1])
if not before or (ARGV[2] ~= '' and before ~= ARGV[2]) then return false end
count(KEYS[4], ARGV[4], KEYS[1], -size_of(before))
redis.call('ZREM', KEYS[3], ARGV[3])
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return before
"""
)
# KEYS: uses, unused. ARGV: 1 record's name. One use less; how many are left.
_RELEASE = """
local left = redis.call('HINCRBY', KEYS[1], ARGV[1], -1)
if left <= 0 then
    redis.call('HDEL', KEYS[1], ARGV[1])
    redis.call('SADD', KEYS[2], ARGV[1])
end
return left
"""

# KEYS: uses, unused. ARGV: 1 record's name. A record that was stored and not catalogued is unused, unless others have
# it.
_REFUSED = "if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then redis.call('SADD', KEYS[2], ARGV[1]) end"


# KEYS: entries, charged. ARGV: 1 tenant. Returns the charge, counted if it was not.
_CHARGE = _COUNT + "count(KEYS[2], ARGV[1], KEYS[1], 0) return redis.call('HGET', KEYS[2], ARGV[1])"


class Images:
    """Written by PUT and DELETE, read by everything else."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._put = client.register_script(_PUT)
        self._delete = client.register_script(_DELETE)
        self._release = client.register_script(_RELEASE)
        self._charge = client.register_script(_CHARGE)
        self._refused = client.register_script(_REFUSED)

    async def put(self, tenant: str, entry: ImageEntry, expected: ExpectedImage = _ANYTHING) -> ImageEntry | None:
        """Catalogue an image; the one of that id before, whose record is now used once less (`release` it).

        Raises `ConditionFailed`: nothing has changed.
        """
        packed = _pack(entry)
        assert packed[3:35] == entry.record_sha256, "the script reads it there"
        async with metadata_errors():
            before = await self._put(
                keys=[_entries(tenant), _ids(tenant), _USES, _UNUSED, _EXPIRES, _CHARGED],
                args=[
                    *(entry.image_id, packed, entry.record_name, int(expected.absent), expected.record_sha256),
                    *(_member(tenant, entry.image_id), entry.expires_ms, tenant),
                ],
            )
        if before == 0:
            raise ConditionFailed(f"{entry.image_id!r} is not as it was expected to be", field="expected")
        return _unpack(entry.image_id, before) if before else None

    async def get(self, tenant: str, image_id: str) -> ImageEntry | None:
        async with metadata_errors():
            raw = cast(bytes | None, await self._client.hget(_entries(tenant), image_id))
        return _unpack(image_id, raw) if raw else None

    async def delete(self, tenant: str, image_id: str, meant: ImageEntry | None = None) -> ImageEntry | None:
        """Take an image out of the catalogue, if it is the one that is `meant`; what it was, None if there was none."""
        async with metadata_errors():
            raw = await self._delete(
                keys=[_entries(tenant), _ids(tenant), _EXPIRES, _CHARGED],
                args=[image_id, _pack(meant) if meant is not None else b"", _member(tenant, image_id), tenant],
            )
        return _unpack(image_id, raw) if raw else None

    async def stored_bytes(self, tenant: str) -> int:
        """Return the bytes of a tenant's records, one that two images have twice, and `ENTRY_BYTES` for each image."""
        async with metadata_errors():
            return int(await self._charge(keys=[_entries(tenant), _CHARGED], args=[tenant]) or 0)

    async def tenants(self) -> list[str]:
        """Those that have, or had, images."""
        async with metadata_errors():
            names = [name for key in (_CHARGED, _STORED) for name in cast(list[bytes], await self._client.hkeys(key))]
        return sorted({name.decode() for name in names})

    async def expired(self, now_ms: int, limit: int) -> list[tuple[str, str]]:
        """Tenants and ids of images whose time is up."""
        async with metadata_errors():
            found = await self._client.zrangebyscore(_EXPIRES, "-inf", now_ms, start=0, num=limit)
        members = (cast(bytes, each).decode().partition("\0") for each in found)
        return [(tenant, image_id) for tenant, _, image_id in members]

    async def release(self, record_name: bytes) -> bool:
        """An image does not use that record any more; whether no other does. Then it is among the `unused`."""
        async with metadata_errors():
            return int(await self._release(keys=[_USES, _UNUSED], args=[record_name])) <= 0

    async def refused(self, record_name: bytes) -> None:
        """A record was stored that is not catalogued: it is among the `unused`, unless an image has it."""
        async with metadata_errors():
            await self._refused(keys=[_USES, _UNUSED], args=[record_name])

    async def unused(self, limit: int) -> list[bytes]:
        """Names of records that no image uses and that may still be stored."""
        async with metadata_errors():
            return cast(list[bytes], await self._client.srandmember(_UNUSED, limit))

    async def removed(self, record_name: bytes) -> None:
        """The record is not stored any more."""
        async with metadata_errors():
            await self._client.srem(_UNUSED, record_name)

    async def list(self, tenant: str, prefix: str, after: str, limit: int) -> tuple[list[ImageEntry], str]:
        """Images whose ids begin with `prefix` and come after `after`, in order; and where to go on, "" at the end.

        A page of up to `limit` ids may hold fewer images: those that were deleted meanwhile are not in it.
        """
        low = f"({after}".encode() if after >= prefix and after else f"[{prefix}".encode()
        high = b"[" + prefix.encode() + b"\xff" if prefix else b"+"  # above every byte of UTF-8
        async with metadata_errors():
            found = await self._client.zrange(_ids(tenant), low, high, bylex=True, offset=0, num=limit)
            ids = cast(list[bytes], found)
            names = [each.decode() for each in ids]
            raws = cast(list[bytes | None], await self._client.hmget(_entries(tenant), names) if ids else [])
        entries = [_unpack(each.decode(), raw) for each, raw in zip(ids, raws, strict=True) if raw]
        return entries, ids[-1].decode() if len(ids) >= limit else ""


def _entries(tenant: str) -> str:
    return "quire:{images}:entries" + (f":{tenant}" if tenant else "")


def _ids(tenant: str) -> str:
    return "quire:{images}:ids" + (f":{tenant}" if tenant else "")


def _member(tenant: str, image_id: str) -> str:
    return f"{tenant}\0{image_id}"


def _pack(entry: ImageEntry) -> bytes:
    named = [entry.record_name] if entry.record_name != entry.record_sha256 else []
    return cbor2.dumps(
        [
            entry.record_sha256,
            entry.record_bytes,
            entry.latent_sha256,
            entry.weights_sha256,
            entry.height,
            entry.width,
            entry.created_ms,
            entry.expires_ms,
            dict(sorted(entry.metadata)),
            entry.provenance,
            *named,
        ]
    )


def _unpack(image_id: str, raw: bytes) -> ImageEntry:
    fields = cbor2.loads(raw)
    entry = ImageEntry(image_id, *fields[:_FIELDS_AT_FIRST])
    expires_ms, metadata, provenance, name = fields[_FIELDS_AT_FIRST:] + _OF_BEFORE[len(fields) - _FIELDS_AT_FIRST :]
    metadata = tuple(sorted(metadata.items()))
    name = name or entry.record_sha256
    return replace(entry, expires_ms=expires_ms, metadata=metadata, provenance=provenance, record_name=name)
