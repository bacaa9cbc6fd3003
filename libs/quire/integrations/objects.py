"""Objects of any bytes under names of their own, for engines that bring both: LMCache, SGLang, vLLM's tiers.

An object is a prefix of its own: pieces of one size that follow each other in memory, so that a large one is read from
several drives and written in one delivery. Its size is part of its name: bytes of another size are never found.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from quire.client import Buffer, Delivery, Lookup, QuireClient
from quire.client.store import StoreSession
from quire.model.durability import Durability
from quire.model.errors import DeadlineExceeded, InvalidRequest, PeerLost, QuireError
from quire.model.hashing import Namespace, engine_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import Attention, Dtype, KvLayout
from quire.telemetry import logger

Ended = TypeVar("Ended")
PIECE_BYTES: Final = 8 << 20
_PIECES_MAX: Final = 1024
_ROWS_MAX, _COLUMNS_MAX = 8192, 16384
_AT_ONCE: Final = 16
_QUIET_S: Final = 5.0
_LOOK_S: Final = 1.0


@lru_cache(maxsize=256)
def layout_of(size: int) -> tuple[KvLayout, int]:
    """Of an object of `size` bytes: the layout of a piece, at most 8 MiB, and how many there are.

    Raises `InvalidRequest` for a size that cannot be cut evenly.
    """
    for pieces in range(max(1, -(-size // PIECE_BYTES)), _PIECES_MAX + 1):
        if size % pieces:
            continue
        length = size // pieces
        for columns in range(min(length, _COLUMNS_MAX), 0, -1):
            if length // columns > _ROWS_MAX:
                break
            if length % columns == 0:
                return KvLayout(1, length // columns, 1, columns, Dtype.FP8_E4M3, Attention.MLA), pieces
    raise InvalidRequest(f"an object of {size} bytes cannot be cut into equal pieces of at most {PIECE_BYTES}")


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

    async def find(self, place: Place, lease_ttl_ms: int) -> Lookup | None:
        """The object, leased, where all of it is there. Raises what `QuireClient.lookup` raises."""
        found = await self._client.lookup(place.namespace, place.keys, lease_ttl_ms=lease_ttl_ms)
        if len(found.keys) == len(place.keys):
            return found
        await self.let_go(found)
        return None

    async def get(self, found: Lookup, memory: Buffer) -> bool:
        """Have it written; whether all of it was. Ends when no node writes to the memory any more."""
        await self._client.reach()
        async with self._room:
            delivery = await self._client.fetch(found, memory, chunk_count=len(found.keys))
            summary = await _ended(delivery, delivery.summary())
            return summary.usable_chunks == len(found.keys)

    async def put(self, place: Place, memory: Buffer) -> None:
        """Store it; ends when no node reads the memory any more. Raises what `QuireClient.store` raises."""
        async with self._room:
            session = await self._client.store(
                place.namespace, place.keys, 0, memory, durability=self._durability, complete=True
            )
            await _ended(session, session.finish())

    async def drop(self, place: Place) -> bool:
        """Whether it is gone: what somebody has leased stays."""
        return await self._client.evict(place.namespace, place.keys) == len(place.keys)

    async def let_go(self, found: Lookup) -> None:
        """Give the lease back; one that cannot be runs out."""
        try:
            await self._client.release(found)
        except QuireError as error:
            logger().debug("a lease stays until it runs out", error=str(error))


async def _ended(transfer: Delivery | StoreSession, end: Coroutine[Any, Any, Ended]) -> Ended:
    """What the transfer ended with, once no node touches its memory any more."""
    try:
        return await end
    except BaseException as error:
        logger().warning("a transfer failed; its memory is kept until no node can touch it", error=repr(error))
        transfer.abandon()
        raise
    finally:
        await quiet(transfer)


async def quiet(transfer: Delivery | StoreSession) -> None:
    """Wait until no node touches the transfer's memory: a silent one may do so for as long as its permit is valid."""
    while True:
        try:
            await transfer.quiesced(_QUIET_S)
            return
        except (DeadlineExceeded, PeerLost) as error:
            logger().warning("waiting for a storage node that may still use this memory", error=str(error))
            await asyncio.sleep(_LOOK_S)


def address_of(memory: Any) -> tuple[int, int]:
    """Address and length of what has the buffer protocol."""
    array = np.frombuffer(memory, dtype=np.uint8)
    return int(array.ctypes.data), array.nbytes
