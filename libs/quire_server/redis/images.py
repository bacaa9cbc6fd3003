"""The catalogue of images: of each tenant by id, in order of ids; and how often each record is used, by all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, cast

import cbor2
import redis.asyncio as redis

from quire.model.errors import ConditionFailed
from quire.model.images import ExpectedImage, ImageEntry
from quire_server.redis.connection import metadata_errors
from quire_server.redis.scripts import script

_ANYTHING = ExpectedImage()
_FIELDS_AT_FIRST: Final = 7
_OF_BEFORE: Final[list[Any]] = [0, {}, "", b""]
"""Time to live, metadata, provenance and name of the record, of entries that were written before there were these."""
_USES, _UNUSED, _EXPIRES = "quire:{images}:uses", "quire:{images}:unused", "quire:{images}:expires"
_CHARGED = "quire:{images}:charged"
_STORED = "quire:{images}:stored"  # of releases before 0.3


class Images:
    """Written by PUT and DELETE, read by everything else."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._put = client.register_script(script("images_put"))
        self._delete = client.register_script(script("images_delete"))
        self._release = client.register_script(script("images_release"))
        self._charge = client.register_script(script("images_charge"))
        self._refused = client.register_script(script("images_refused"))

    async def put(self, tenant: str, entry: ImageEntry, expected: ExpectedImage = _ANYTHING) -> ImageEntry | None:
        """Catalogue an image; the one of that id before, whose record is now used once less (`release` it).

        One whose time was over when the image was created counts as none for `expected`.

        Raises `ConditionFailed`: nothing has changed.
        """
        packed = _pack(entry)
        assert packed[3:35] == entry.record_sha256, "the script reads it there"
        async with metadata_errors():
            previous = await self._put(
                keys=[_entries(tenant), _ids(tenant), _USES, _UNUSED, _EXPIRES, _CHARGED],
                args=[
                    *(entry.image_id, packed, entry.record_name, int(expected.absent), expected.record_sha256),
                    *(_member(tenant, entry.image_id), entry.expires_ms, tenant, entry.created_ms),
                ],
            )
        if previous == 0:
            raise ConditionFailed(f"{entry.image_id!r} is not as expected", field="expected")
        return _unpack(entry.image_id, previous) if previous else None

    async def get(self, tenant: str, image_id: str) -> ImageEntry | None:
        async with metadata_errors():
            raw = cast(bytes | None, await self._client.hget(_entries(tenant), image_id))
        return _unpack(image_id, raw) if raw else None

    async def delete(self, tenant: str, image_id: str, meant: ImageEntry | None = None) -> ImageEntry | None:
        """Take an image out of the catalogue, if it is the one that is `meant`; return it, None if there was none."""
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
        """Return the tenants that have, or had, images."""
        async with metadata_errors():
            names = [name for key in (_CHARGED, _STORED) for name in cast(list[bytes], await self._client.hkeys(key))]
        return sorted({name.decode() for name in names})

    async def expired(self, now_ms: int, limit: int) -> list[tuple[str, str]]:
        """Tenants and ids of images whose time is up."""
        async with metadata_errors():
            rows = await self._client.zrangebyscore(_EXPIRES, "-inf", now_ms, start=0, num=limit)
        members = (cast(bytes, row).decode().partition("\0") for row in rows)
        return [(tenant, image_id) for tenant, _, image_id in members]

    async def release(self, record_name: bytes) -> bool:
        """Note that an image stops using that record; return whether it was the last one.

        Then the record is among the `unused`.
        """
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
        """Note that the record was deleted."""
        async with metadata_errors():
            await self._client.srem(_UNUSED, record_name)

    async def list(self, tenant: str, prefix: str, after: str, limit: int) -> tuple[list[ImageEntry], str]:
        """Images whose ids begin with `prefix` and come after `after`, in order; and where to go on, "" at the end.

        A page of up to `limit` ids may hold fewer images: those that were deleted during the call are not in it.
        """
        low = f"({after}".encode() if after >= prefix and after else f"[{prefix}".encode()
        high = b"[" + prefix.encode() + b"\xff" if prefix else b"+"  # above every byte of UTF-8
        async with metadata_errors():
            rows = await self._client.zrange(_ids(tenant), low, high, bylex=True, offset=0, num=limit)
            ids = cast(list[bytes], rows)
            names = [row.decode() for row in ids]
            raws = cast(list[bytes | None], await self._client.hmget(_entries(tenant), names) if ids else [])
        entries = [_unpack(image_id.decode(), raw) for image_id, raw in zip(ids, raws, strict=True) if raw]
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
