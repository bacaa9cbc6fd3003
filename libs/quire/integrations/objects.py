"""Objects of any bytes under names of their own, for engines that bring both: LMCache, SGLang, vLLM's tiers.

An object is a prefix of its own: pieces of one size that follow each other in memory, so that a large one is read from
several drives and written in one delivery. Its size is part of its name: bytes of another size are never found.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from quire.client import Buffer, Delivery, QuireClient
from quire.client.store import StoreSession
from quire.model.durability import Durability
from quire.model.errors import DeadlineExceeded, InvalidRequest, PeerLost
from quire.model.hashing import Namespace, engine_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import Attention, Dtype, KvLayout
from quire.telemetry import logger

PIECE_BYTES: Final = 8 << 20
_PIECES_MAX: Final = 1024
_ROWS_MAX, _COLUMNS_MAX = 8192, 16384
_AT_ONCE: Final = 16
_QUIET_S: Final = 5.0
_LOOK_S: Final = 0.02


@lru_cache(maxsize=256)
def layout_of(size: int) -> tuple[KvLayout, int]:
    """Of an object of `size` bytes: the layout of a piece, at most 8 MiB, and how many there are.

    Raises `InvalidRequest` for a size that cannot be cut evenly.
    """
    for pieces in range(max(1, -(-size // PIECE_BYTES)), _PIECES_MAX + 1):
        layout = plain_layout(1, size // pieces) if size % pieces == 0 else None
        if layout is not None:
            return layout, pieces
    raise InvalidRequest(f"an object of {size} bytes cannot be cut into equal pieces of at most {PIECE_BYTES}")


@lru_cache(maxsize=256)
def plain_layout(num_layers: int, slice_bytes: int) -> KvLayout | None:
    """Of chunks whose slices are plain bytes, so many in each layer. None for a length that no layout has."""
    for columns in range(min(slice_bytes, _COLUMNS_MAX), 0, -1):
        if slice_bytes // columns > _ROWS_MAX:
            return None
        if slice_bytes % columns == 0:
            return KvLayout(num_layers, slice_bytes // columns, 1, columns, Dtype.FP8_E4M3, Attention.MLA)
    return None


@dataclass(frozen=True, slots=True)
class Place:
    """Where an object is: its namespace and the keys of its pieces."""

    namespace: Namespace
    keys: ChunkKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose objects: `model` and `version` say what else, besides its name, decides the bytes of an object."""

    model: str
    version: str
    tenant_salt: bytes = b""

    def place(self, name: bytes, size: int) -> Place:
        """Of the object `name`. Raises `InvalidRequest`."""
        layout, pieces = layout_of(size)
        space = Namespace(self.model, self.version, layout, self.tenant_salt)
        names = b"".join(hashlib.sha256(b"%d:" % at + name).digest() for at in range(pieces))
        return Place(space, engine_keys(space, ChunkKeys(names)))


def memory_at(address: int, length: int) -> npt.NDArray[np.uint8]:
    """Memory that somebody else keeps, as an array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))


class Objects:
    """Over one client, on its loop. At most 16 transfers at a time; more wait."""

    def __init__(self, client: QuireClient, durability: Durability) -> None:
        self._client = client
        self._durability = durability
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def has(self, place: Place) -> bool:
        """Whether all of it is there. It is not leased: it may be gone when it is wanted, as from any cache.

        Raises what `QuireClient.lookup` raises.
        """
        found = await self._client.lookup(place.namespace, place.keys, lease_ttl_ms=0)
        return len(found.keys) == len(place.keys)

    async def get(self, place: Place, memory: Buffer) -> bool:
        """Have it written; whether all of it was. Ends when no node writes to the memory any more.

        Raises what `QuireClient.retrieve` raises.
        """
        async with self._room:
            count = await retrieve_into(self._client, place.namespace, place.keys, memory)
        return count == len(place.keys)

    async def put(self, place: Place, memory: Buffer) -> None:
        """Store it; ends when no node reads the memory any more. Raises what `QuireClient.store` raises."""
        session = None
        async with self._room:
            try:
                session = await self._client.store(
                    place.namespace, place.keys, 0, memory, durability=self._durability, complete=True
                )
                await session.finish()
            finally:
                await until_idle(memory, session)

    async def drop(self, place: Place) -> bool:
        """Whether it is gone: what somebody has leased stays."""
        return await self._client.evict(place.namespace, place.keys) == len(place.keys)


async def retrieve_into(
    client: QuireClient,
    namespace: Namespace,
    keys: ChunkKeys,
    memory: Buffer,
    *,
    first_chunk: int = 0,
    layer_stride: int = 0,
    chunk_offsets: npt.ArrayLike | None = None,
) -> int:
    """How many chunks arrived, from `first_chunk` on, once no node writes to the memory any more.

    Raises what `QuireClient.retrieve` raises, no earlier: where the answer was lost, nodes may be writing.
    """
    delivery = None
    try:
        retrieval = await client.retrieve(
            namespace,
            keys,
            memory,
            first_chunk=first_chunk,
            lease_ttl_ms=0,
            layer_stride=layer_stride,
            chunk_offsets=chunk_offsets,
        )
        delivery = retrieval.delivery
        return (await delivery.summary()).usable_chunks if delivery is not None else 0
    finally:
        await until_idle(memory, delivery)


async def until_idle(memory: Buffer, transfer: Delivery | StoreSession | None) -> None:
    """Wait until no node touches the memory: a silent one may do so for as long as its permit is valid."""
    if transfer is not None and sys.exc_info()[0] is not None:
        transfer.abandon()
    while memory.is_busy:
        try:
            if transfer is not None:
                await transfer.quiesced(_QUIET_S)
        except (DeadlineExceeded, PeerLost) as error:
            logger().warning("waiting for a storage node that may still use this memory", error=str(error))
        if memory.is_busy:
            await asyncio.sleep(_LOOK_S)


def address_of(memory: Any) -> tuple[int, int]:
    """Address and length of what has the buffer protocol."""
    array = np.frombuffer(memory, dtype=np.uint8)
    return int(array.ctypes.data), array.nbytes
