"""Objects of any bytes under names of their own, for engines that bring both: LMCache, SGLang, vLLM's tiers.

An object of up to 8 MiB is a chunk that stands for itself: many are asked for, delivered or stored in one request. A
larger one is a prefix of its own: pieces of one size that follow each other in memory. The size of an object is part of
its name: bytes of another size are never found.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import sys
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from quire.client import AsyncClient, Buffer, Delivery, SlicePlaces
from quire.client.store import StoreSession
from quire.model.durability import Durability
from quire.model.errors import DeadlineExceeded, InvalidRequest, PeerLost
from quire.model.hashing import Namespace, engine_keys
from quire.model.keys import KEY_BYTES, ChunkKeys
from quire.model.layout import Attention, Dtype, KvLayout
from quire.telemetry import logger

PIECE_BYTES: Final = 8 << 20
_PIECES_MAX: Final = 1024
_ROWS_MAX, _COLUMNS_MAX = 8192, 16384
_AT_ONCE: Final = 16
_TOGETHER_MAX, _TOGETHER_BYTES = 256, 64 << 20
_QUIET_S: Final = 5.0
_LOOK_S: Final = 0.02


@lru_cache(maxsize=256)
def layout_of(size: int) -> tuple[KvLayout, int]:
    """Divide an object of `size` bytes: the layout of a piece, at most 8 MiB, and the number of pieces.

    Raises `InvalidRequest` for a size that cannot be cut evenly.
    """
    for pieces in range(max(1, -(-size // PIECE_BYTES)), _PIECES_MAX + 1):
        layout = plain_layout(1, size // pieces) if size % pieces == 0 else None
        if layout is not None:
            return layout, pieces
    raise InvalidRequest(f"an object of {size} bytes cannot be cut into equal pieces of at most {PIECE_BYTES}")


@lru_cache(maxsize=256)
def plain_layout(num_layers: int, slice_bytes: int) -> KvLayout | None:
    """Return the layout of chunks whose slices are plain bytes, of equal length in each layer.

    None for a length that no layout has.
    """
    for columns in range(min(slice_bytes, _COLUMNS_MAX), 0, -1):
        if slice_bytes // columns > _ROWS_MAX:
            return None
        if slice_bytes % columns == 0:
            return KvLayout(num_layers, slice_bytes // columns, 1, columns, Dtype.FP8_E4M3, Attention.MLA)
    return None


@dataclass(frozen=True, slots=True)
class Place:
    """Address of an object: its namespace, and a digest of 32 bytes for each of its pieces, concatenated."""

    namespace: Namespace
    digests: bytes

    @property
    def pieces(self) -> int:
        """Number of chunks that the object is cut into."""
        return len(self.digests) // KEY_BYTES

    @property
    def keys(self) -> ChunkKeys:
        """Keys of the pieces. A transfer of many objects makes theirs together."""
        return engine_keys(self.namespace, ChunkKeys(self.digests))


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Owner of objects: `model` and `version` name the facts, besides its name, that decide the bytes of an object."""

    model: str
    version: str
    tenant_salt: bytes = b""

    def place(self, name: bytes, size: int) -> Place:
        """Return the place of the object `name`. Raises `InvalidRequest`."""
        space, pieces = _space_of(self, size)
        return Place(space, b"".join([hashlib.sha256(b"%d:" % at + name).digest() for at in range(pieces)]))


@lru_cache(maxsize=256)
def _space_of(owner: Owner, size: int) -> tuple[Namespace, int]:
    """Return the one namespace of an owner's objects of `size` bytes, and the number of their pieces.

    Raises `InvalidRequest`.
    """
    layout, pieces = layout_of(size)
    return Namespace(owner.model, owner.version, layout, owner.tenant_salt), pieces


def memory_at(address: int, length: int) -> npt.NDArray[np.uint8]:
    """A view of memory that the caller owns: uint8, shape (length,)."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))


class Objects:
    """Over one client, on its loop. At most 16 transfers at a time; more wait."""

    def __init__(self, client: AsyncClient, durability: Durability) -> None:
        self._client = client
        self._durability = durability
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def have(self, places: Sequence[Place]) -> list[bool]:
        """Return which are stored. They are not leased: one may be evicted before it is loaded, as from any cache.

        Raises the errors of `AsyncClient.lookup`.
        """
        present = [False] * len(places)

        async def look_up(group: list[int]) -> None:
            space, keys = _together(places, group)
            match = await self._client.lookup(space, keys, lease_ttl_ms=0, unchained=len(group) > 1)
            if len(group) == 1:
                present[group[0]] = len(match.keys) == len(keys)
            for at in match.there if len(group) > 1 else ():
                present[group[at]] = True

        await asyncio.gather(*(look_up(group) for group in _groups(places)))
        return present

    async def get(self, places: Sequence[Place], memory: Buffer, offsets: Sequence[int]) -> list[bool]:
        """Load each to its offset in the memory; returns which arrived.

        Ends when every node has stopped writing to the memory. Raises the errors of `AsyncClient.retrieve`.
        """
        arrived = [False] * len(places)

        async def retrieve(group: list[int]) -> None:
            space, keys = _together(places, group)
            length = space.layout.chunk_bytes
            if len(group) == 1:
                target = memory.part(offsets[group[0]], length * len(keys))
                async with self._room:
                    mask = await retrieve_into(self._client, space, keys, target)
                arrived[group[0]] = sum(mask) == len(keys)
                return
            base = min(offsets[at] for at in group)
            target = memory.part(base, max(offsets[at] for at in group) - base + length)
            async with self._room:
                mask = await retrieve_into(
                    self._client,
                    space,
                    keys,
                    target,
                    places=SlicePlaces(chunk_offsets=[offsets[at] - base for at in group]),
                    unchained=True,
                )
            for at, is_present in zip(group, mask, strict=True):
                arrived[at] = bool(is_present)

        await _all(retrieve(group) for group in _groups(places))
        return arrived

    async def put(self, places: Sequence[Place], memory: Buffer) -> None:
        """Store the objects that fill the memory, one behind the other; all of one size.

        Ends when every node has stopped reading the memory. Raises the errors of `AsyncClient.store`.
        """
        groups = _groups(places)
        length = memory.length // max(1, len(places))

        async def store(group: list[int]) -> None:
            space, keys = _together(places, group)
            source, session = memory.part(group[0] * length, len(group) * length), None
            async with self._room:
                try:
                    session = await self._client.store(
                        space, keys, 0, source, durability=self._durability, complete=True, unchained=len(group) > 1
                    )
                    await session.acknowledged()
                finally:
                    await until_idle(source, session)

        await _all(store(group) for group in groups)

    async def drop(self, place: Place) -> bool:
        """Delete the object; whether it is deleted. One that a lease pins stays."""
        return await self._client.evict(place.namespace, place.keys) == place.pieces


def _groups(places: Sequence[Place]) -> list[list[int]]:
    """Group the objects that one request can name: those of one piece, by namespace; each larger one alone."""
    groups: dict[object, list[int]] = {}
    for at, place in enumerate(places):
        groups.setdefault(place.namespace if place.pieces == 1 else at, []).append(at)
    cut = []
    for group in groups.values():
        step = max(1, min(_TOGETHER_MAX, _TOGETHER_BYTES // places[group[0]].namespace.layout.chunk_bytes))
        cut += [group[at : at + step] for at in range(0, len(group), step)]
    return cut


def _together(places: Sequence[Place], group: Sequence[int]) -> tuple[Namespace, ChunkKeys]:
    space = places[group[0]].namespace
    return space, engine_keys(space, ChunkKeys(b"".join([places[at].digests for at in group])))


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for the end of each; then raise the first one's error."""
    for end in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(end, BaseException):
            raise end


async def retrieve_into(
    client: AsyncClient,
    namespace: Namespace,
    keys: ChunkKeys,
    memory: Buffer,
    *,
    first_chunk: int = 0,
    places: SlicePlaces | None = None,
    unchained: bool = False,
) -> bytes:
    """Return which chunks arrived, 1 byte for each from `first_chunk` on, once no node writes to the memory.

    Raises the errors of `AsyncClient.retrieve`, no earlier: where the answer was lost, nodes may be writing.
    """
    delivery, arrived = None, bytearray(len(keys) - first_chunk)
    try:
        retrieval = await client.retrieve(
            namespace,
            keys,
            memory,
            first_chunk=first_chunk,
            lease_ttl_ms=0,
            places=places,
            unchained=unchained,
        )
        delivery = retrieval.delivery
        if delivery is not None:
            present = [at for at in retrieval.found.there if at >= first_chunk]
            is_whole = await delivery.is_whole(len(present))
            marks = b"\1" * len(present) if is_whole else (await delivery.summary()).delivered
            for at, mark in zip(present, marks, strict=True):
                arrived[at - first_chunk] = mark
        return bytes(arrived)
    finally:
        await until_idle(memory, delivery)


async def until_idle(memory: Buffer, transfer: Delivery | StoreSession | None) -> None:
    """Wait until no node touches the memory for the transfer: a silent one may for as long as its permit is valid.

    None for one of which nothing is known but that it has the memory.
    """
    if transfer is not None and sys.exc_info()[0] is not None:
        transfer.abandon()
    while transfer.is_lent if transfer is not None else memory.is_busy:
        try:
            if transfer is not None:
                await transfer.quiesced(_QUIET_S)
        except (DeadlineExceeded, PeerLost) as error:
            logger().warning("waiting for a storage node that may still use this memory", error=str(error))
        await asyncio.sleep(_LOOK_S if transfer is None or transfer.is_lent else 0)


def address_of(memory: Any) -> tuple[int, int]:
    """Return address and length of an object with the buffer protocol."""
    array = np.frombuffer(memory, dtype=np.uint8)
    return int(array.ctypes.data), array.nbytes
