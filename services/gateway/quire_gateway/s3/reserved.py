"""Buckets of Quire's own: KV chunks and latents as ordinary objects.

They are written only whole, and a name must match its content: a chunk under the key in its header, a latent record
that decodes. Chunks show once they are in the object tier.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import product
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from quire.model.buckets import DeleteOutcome, Deletion, Page, StoredObject
from quire.model.chunk_object import (
    HEADER,
    ChunkObject,
    header_at_end,
    read_chunk_object,
    record_of,
    sound_header,
    write_chunk_object,
)
from quire.model.errors import CorruptData, ImageMissing, InvalidRequest
from quire.model.images import RECORD_BYTES_MAX, ImageAttributes, ImageEntry
from quire.model.keys import ChunkKeys
from quire_gateway.access.key_derivation import KeyDerivation
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.images.service import ImageService
from quire_gateway.ports import ChunkAttributes, ChunkIndex
from quire_gateway.s3.body import Body
from quire_gateway.s3.chunk_names import ChunkName, namespace_of, translated, translated_tail
from quire_gateway.s3.declared import Described

WHOLE_BODIES: Final = 4
"""Requests that hold a whole object of these buckets in memory at a time."""
WholeBody = Callable[[], AbstractAsyncContextManager[None]]
"""Makes a turn to hold one."""
_CHUNK_BYTES_MAX: Final = 256 << 20
_PIECE_BYTES: Final = 8 << 20
_TAIL_BYTES: Final = 8192
_HEX: Final = "0123456789abcdef"
_HEADERS_AT_ONCE: Final = 16
_LOOKED_AT_MAX: Final = 4096
_DIGITS_MAX: Final = 9


class ChunkStore(Protocol):
    """The object tier, as far as chunks go. Of several objects of a chunk the newest counts."""

    async def head(self, key: bytes) -> ChunkAttributes | None: ...
    async def read(self, chunk: ChunkAttributes, start: int, end: int) -> memoryview: ...
    async def shard(self, first: str) -> list[ChunkAttributes]:
        """List chunks whose keys begin with these two hexadecimal digits, in order of their keys."""

    async def write(self, key: bytes, data: bytes) -> None:
        """Write an object with a name that no other one has."""


class ChunkBackend:
    """`quire-kv`: an object's key is `NAMESPACE/KEY` of its chunk (`ChunkName`).

    A range of it is a layer (`chunk_object`).
    """

    def __init__(self, chunks: ChunkStore, index: ChunkIndex, derivation: KeyDerivation, whole_body: WholeBody) -> None:
        self._chunks = chunks
        self._index = index
        self._derivation = derivation
        self._whole = whole_body

    async def check_there(self) -> None:
        return

    async def head(self, key: str) -> StoredObject | None:
        """Return its entry; None too for an object that the index does not list: it is on its way out."""
        name = ChunkName.parse(key)
        chunk = await self._chunks.head(await self._derived(name)) if name is not None else None
        if name is None or chunk is None:
            return None
        header = await self._header(chunk, name.namespace)
        if header is None or not await self._index.lists_object(record_of(header)):
            return None
        return _chunk_entry(name, chunk)

    async def read(self, entry: StoredObject, start: int, end: int) -> AsyncIterator[memoryview]:
        """Whole layers are read and verified, and the requested bytes of them are passed on. Raises `CorruptData`."""
        name = ChunkName.parse(entry.key)
        chunk = await self._chunks.head(await self._derived(name)) if name is not None else None
        header = await self._header(chunk, name.namespace) if name is not None and chunk is not None else None
        if name is None or chunk is None or header is None or chunk.size != entry.size:
            raise CorruptData("a chunk's header that is invalid, or does not match its checksum")
        layers, size = int(header["num_layers"]), int(header["slice_bytes"])
        payload_bytes = layers * size
        sums = await self._chunks.read(
            chunk, payload_bytes + HEADER.itemsize, payload_bytes + HEADER.itemsize + 4 * layers
        )
        expected = np.frombuffer(sums, dtype="<u4")
        at_once = max(1, _PIECE_BYTES // size)
        for first in range(start // size, min(layers, -(-end // size)), at_once):
            stop = min(layers, -(-end // size), first + at_once)
            piece = await self._chunks.read(chunk, first * size, stop * size)
            if not await asyncio.to_thread(_sound, piece, size, expected[first:stop]):
                raise CorruptData("a layer does not match its checksum")
            yield piece[max(0, start - first * size) : end - first * size]
        if end > payload_bytes:
            tail = bytes(await self._chunks.read(chunk, payload_bytes, chunk.size))
            revert = partial(self._derivation.revert, name.namespace)
            yield memoryview(await translated_tail(tail, revert))[max(0, start - payload_bytes) : end - payload_bytes]

    async def _derived(self, name: ChunkName) -> bytes:
        return (await self._derivation.derive(name.namespace, ChunkKeys(name.key))).packed

    async def _header(self, chunk: ChunkAttributes, namespace: bytes) -> np.void | None:
        """The fixed fields of a chunk's header, if it is this chunk's, of this namespace, and sound."""
        tail = bytes(await self._chunks.read(chunk, max(0, chunk.size - _TAIL_BYTES), chunk.size))
        raw = header_at_end(tail)
        row = sound_header(raw) if raw is not None else None
        right = row is not None and (row["key"].tobytes(), row["namespace"].tobytes()) == (chunk.key, namespace)
        return row if right else None

    async def page(self, prefix: str, marker: str, past: bool, limit: int, delimiter: str = "") -> Page:
        """List chunks of one namespace in the order of their derived keys, by the headers of all chunk objects.

        A request looks at `_LOOKED_AT_MAX` objects or a few more, whether or not they are of the namespace. Its `last`
        is the name that the last one would have there.
        """
        namespace = namespace_of(prefix)
        if namespace is None:
            return Page([], "", more=False)
        if past:
            raise S3Error("InvalidArgument", "Chunks are not grouped below their namespace")
        place = await self._place(namespace, prefix, marker)
        entries: list[StoredObject] = []
        looked_at = 0
        for first in map("".join, product(_HEX, repeat=2)):
            if first < place[:1].hex():
                continue
            shard = [chunk for chunk in await self._chunks.shard(first) if chunk.key > place]
            for at in range(0, len(shard), _HEADERS_AT_ONCE):
                part = shard[at : at + _HEADERS_AT_ONCE]
                headers = await asyncio.gather(*(self._header(chunk, namespace) for chunk in part))
                keys = await self._derivation.revert(namespace, ChunkKeys(b"".join(chunk.key for chunk in part)))
                for key, chunk, header in zip(keys, part, headers, strict=True):
                    name = ChunkName(namespace, key)
                    if header is not None and str(name).startswith(prefix):
                        entries.append(_chunk_entry(name, chunk))
                    if len(entries) == limit:
                        return Page(entries, str(name), more=True)
                looked_at += len(part)
                if looked_at >= _LOOKED_AT_MAX:
                    return Page(entries, str(name), more=True, pause=True)
        return Page(entries, entries[-1].key if entries else "", more=False)

    async def _place(self, namespace: bytes, prefix: str, marker: str) -> bytes:
        """Return the derived key after which a listing continues. Raises `S3Error` for a key of another namespace."""
        name = ChunkName.parse(marker)
        if name is None and marker < prefix:
            return b""
        if name is None or name.namespace != namespace:
            raise S3Error("InvalidArgument", "In this bucket a listing goes on after a key that was listed")
        return await self._derived(name)

    async def put(self, key: str, body: Body, described: Described, expected: str) -> StoredObject:
        async with body.spooled(_CHUNK_BYTES_MAX) as spool:
            body.finish()
            async with self._whole():  # only once it is here: a slow client holds no turn
                await self._put(key, await asyncio.to_thread(spool.read))
        entry = await self.head(key)
        if entry is None:
            raise S3Error("ServiceUnavailable", "The chunk was evicted at once")
        return entry

    async def _put(self, key: str, raw: bytes) -> None:
        try:
            chunk = await asyncio.to_thread(read_chunk_object, raw)
        except CorruptData as error:
            raise S3Error("InvalidRequest", f"This bucket takes chunks only: {error.message}") from None
        namespace = chunk.record.namespace
        if ChunkName.parse(key) != ChunkName(namespace, chunk.record.key):
            raise S3Error("InvalidRequest", "The chunk in the body has another namespace or key than the object")
        header = await translated(chunk.header, partial(self._derivation.derive, namespace))
        record = record_of(np.frombuffer(header, dtype=HEADER, count=1)[0])
        if not await self._index.expect_object(record):
            raise S3Error("SlowDown", "An older object of that key is being deleted; try again")
        existing = await self._stored(record.key)
        if existing is not None and not np.array_equal(existing.payload, chunk.payload):
            raise S3Error("ConditionalRequestConflict", "Other bytes are stored under that key")
        if existing is None or not await self._index.lists_object(record):
            await self._chunks.write(record.key, await asyncio.to_thread(write_chunk_object, chunk.payload, header))
        if not await self._index.commit_object(record):
            # The object stays for a time: its parent may be on its way.
            raise S3Error("InvalidRequest", "The chunk extends one that is not stored; store that one before")

    async def _stored(self, key: bytes) -> ChunkObject | None:
        """Return its entry; None too for a damaged one: it may be written again."""
        chunk = await self._chunks.head(key)
        if chunk is None:
            return None
        raw = bytes(await self._chunks.read(chunk, 0, chunk.size))
        try:
            return await asyncio.to_thread(read_chunk_object, raw)
        except CorruptData:
            return None

    async def delete(self, key: str, etag: str) -> Deletion:
        """Out of the index; the nodes that hold the chunk drop it, the object tier too."""
        _unconditional(etag)
        name = ChunkName.parse(key)
        async with self._whole():
            chunk = await self._stored(await self._derived(name)) if name is not None else None
        if name is None or chunk is None or chunk.record.namespace != name.namespace:
            return Deletion(DeleteOutcome.MISSING)
        if not await self._index.evict_object(chunk.record):
            raise S3Error("ConditionalRequestConflict", "A lease pins the chunk, or others extend it")
        return Deletion(DeleteOutcome.DELETED)


class LatentBackend:
    """`quire-latents`: an object's key is its image's id, its bytes are the latent record. Of a tenant's images."""

    def __init__(self, images: ImageService, tenant: str, whole_body: WholeBody) -> None:
        self._images = images
        self._tenant = tenant
        self._whole = whole_body

    async def check_there(self) -> None:
        return

    async def head(self, key: str) -> StoredObject | None:
        try:
            return _latent_entry(await self._images.head(self._tenant, key))
        except (ImageMissing, InvalidRequest):
            return None

    async def read(self, entry: StoredObject, start: int, end: int) -> AsyncIterator[memoryview]:
        async with self._whole():
            _, record = await self._images.get_record(self._tenant, entry.key)
        if _etag(hashlib.sha256(record).digest()) != entry.etag:
            raise S3Error("ConditionalRequestConflict", "The latent was replaced meanwhile")
        yield memoryview(record)[start:end]

    async def page(self, prefix: str, marker: str, past: bool, limit: int, delimiter: str = "") -> Page:
        objects: list[StoredObject] = []
        async for entry in self._images.list(self._tenant, prefix, marker + "\U0010ffff" if past else marker):
            objects.append(_latent_entry(entry))
            if len(objects) >= limit:
                break
        return Page(objects, objects[-1].key if objects else "", more=len(objects) >= limit)

    async def put(self, key: str, body: Body, described: Described, expected: str) -> StoredObject:
        _unconditional(expected)
        async with body.spooled(RECORD_BYTES_MAX) as spool:
            body.finish()
            async with self._whole():  # only once it is here: a slow client holds no turn
                record = await asyncio.to_thread(spool.read)
                metadata = dict(described.metadata)
                allowed = metadata.pop("allow-unknown-vae", "").lower() in ("1", "true")
                ttl_ms, provenance = _ttl_ms(metadata.pop("ttl", "0")), metadata.pop("provenance", "")
                attributes = ImageAttributes(ttl_ms, tuple(metadata.items()), provenance)
                entry = await self._images.put_record(
                    self._tenant, key, record, attributes=attributes, allow_unknown_vae=allowed
                )
                return _latent_entry(entry)

    async def delete(self, key: str, etag: str) -> Deletion:
        _unconditional(etag)
        await self._images.delete(self._tenant, key)
        return Deletion(DeleteOutcome.DELETED)


def _sound(piece: memoryview, size: int, expected: npt.NDArray[np.uint32]) -> bool:
    """Whether layers of `size` bytes, one behind the other, match their checksums."""
    sums = [isal_zlib.crc32(piece[at : at + size]) for at in range(0, len(piece), size)]
    return bool(np.array_equal(np.array(sums, dtype=np.uint32), expected))


def _unconditional(expected: str) -> None:
    """Refuse conditions by `S3Error`: these buckets cannot check and write in one step."""
    if expected:
        raise S3Error("NotImplemented", "This bucket has no conditional writes")


def _chunk_entry(name: ChunkName, chunk: ChunkAttributes) -> StoredObject:
    etag = _etag(hashlib.sha256(chunk.etag.encode() or chunk.key).digest())
    return StoredObject(str(name), etag, chunk.size, chunk.modified_s, ())


def _latent_entry(entry: ImageEntry) -> StoredObject:
    headers = {"content-type": "application/x-quire-latent"}
    return StoredObject(
        key=entry.image_id,
        etag=_etag(entry.record_sha256),
        size=entry.record_bytes,
        modified_s=entry.created_ms / 1e3,
        blobs=(),
        headers=headers,
        metadata=dict(entry.metadata),
    )


def _ttl_ms(text: str) -> int:
    """Parse a number of seconds. Raises `InvalidRequest`."""
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        raise InvalidRequest(f"{text[:40]!r}; seconds", field="x-amz-meta-ttl")
    return 1000 * int(text)


def _etag(sha256: bytes) -> str:
    """Not an MD5, and not to be taken for one."""
    return f"{sha256.hex()[:32]}-1"
