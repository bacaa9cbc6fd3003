"""Interface to a node's chunks: `core.residency` decides, `execution` carries it out."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from quire.model.durability import Durability, OnExisting
from quire.model.errors import PoolFull, QuireError
from quire.model.records import ChunkRecord
from quire.telemetry import logger
from quire_storage.cluster.registry import Registry
from quire_storage.core.chunks import Chunk, Copy, Header, MemoryPlace
from quire_storage.core.pool.slots import Shape
from quire_storage.core.residency import Residency
from quire_storage.core.residency import events as ev
from quire_storage.errors import DriveFailed
from quire_storage.ports import Clock
from quire_storage.tiers.arena import Arena
from quire_storage.tiers.execution import Executor
from quire_storage.tiers.object_tier import ChunkObjects
from quire_storage.tiers.pool import Pool
from quire_storage.tiers.write_behind import WriteBehind

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class Slots:
    """Slots of the arena for one transfer: slice l of slot i is at `offsets[i]` + l·`layer_stride`.

    `unsettled`: a peer may still touch them, so that they are not used again.
    """

    ticket: int
    shape: Shape
    offsets: npt.NDArray[np.int64]
    layer_stride: int
    unsettled: bool = False


@dataclass(frozen=True, slots=True)
class PinnedCopies:
    """Chunks that stay where they are until `Tiers.unpin`. `missing`: keys that are not here."""

    ticket: int
    copies: list[Copy]
    missing: list[bytes]


class Tiers:
    """Tiers for one event loop. `checked`: number of events between checks of the machine's invariants (tests).

    `draw` makes the random bytes of generations.
    """

    def __init__(
        self,
        *,
        residency: Residency,
        arena: Arena,
        pool: Pool | None,
        objects: ChunkObjects | None,
        write_behind: WriteBehind | None,
        registry: Registry,
        clock: Clock,
        wait_s: float,
        checked: int = 0,
        draw: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._draw = draw
        self._registry = registry
        self.residency = residency
        self.arena = arena
        self.pool = pool
        self.objects = objects
        self.write_behind = write_behind
        self._wait_s = wait_s
        self._executor = Executor(
            residency=residency,
            arena=arena,
            pool=pool,
            write_behind=write_behind,
            registry=registry,
            clock=clock,
            checked=checked,
        )
        if pool is not None:
            pool.on_lost(lambda drive: self._executor.post(ev.DriveLost(drive)))

    async def close(self) -> None:
        """Write the chunks that are in memory only, as far as the drives have space; then stop."""
        await self._executor.ask(lambda ticket: ev.Stopping(ticket))
        await self._executor.close()

    # ---- what is here

    def find(self, key: bytes) -> Header | None:
        """Return the header of a chunk that can be read here."""
        listing = self.residency.look(key)
        return listing[0] if listing is not None else None

    def find_all(self, keys: Sequence[bytes]) -> list[Chunk]:
        """Return the chunks that can be read here."""
        return [header.chunk for key in keys if (header := self.find(key)) is not None]

    @property
    def used_bytes(self) -> int:
        """Used bytes of the drives, or of memory if that has more."""
        return max(self.arena.slots.used_bytes, self.pool.map.used_bytes if self.pool is not None else 0)

    # ---- reading

    def pin(self, keys: Sequence[bytes], *, used: bool = True) -> PinnedCopies:
        """Keep the chunks that are here where they are, until `unpin`. `used`: a sign of interest."""
        ticket = self._executor.ticket()
        event = ev.Pinned(ticket, list(keys), used)
        copies, absent = cast(ev.PinResult, self._executor.answered_at_once(ticket, event))
        self._executor.count()
        return PinnedCopies(ticket, copies, absent)

    def pin_also(self, copy: Copy) -> PinnedCopies:
        """Keep a copy that is pinned already for longer."""
        ticket = self._executor.ticket()
        self._executor.post(ev.PinnedAlso(ticket, copy.number))
        return PinnedCopies(ticket, [copy], [])

    def follow(self, pinned: PinnedCopies, slots: Slots, keys: Sequence[bytes], positions: Sequence[int]) -> list[int]:
        """Preserve slots of a running store until `unpin`: those of `keys`, at `positions` among the slots.

        Returns the places in `keys` of the chunks that are still in these slots.
        """
        ticket = self._executor.ticket()
        offsets = slots.offsets[list(positions)].tolist()
        event = ev.Followed(ticket, pinned.ticket, slots.ticket, list(keys), offsets)
        return cast(list[int], self._executor.answered_at_once(ticket, event))

    def unpin(self, pinned: PinnedCopies) -> None:
        """Let go."""
        self._executor.post(ev.Unpinned(pinned.ticket))

    @contextlib.contextmanager
    def pinned(self, keys: Sequence[bytes]) -> Iterator[list[Copy]]:
        """Pin the chunks that are here, for a use that does not count as one."""
        pinned = self.pin(keys, used=False)
        try:
            yield pinned.copies
        finally:
            self.unpin(pinned)

    def promote(
        self, copies: Sequence[Copy], *, prefetch: bool = False
    ) -> tuple[int, dict[int, tuple[int, MemoryPlace]]]:
        """Reserve slots for pinned copies that are read from a drive and should stay in memory.

        Returns a ticket, and by a copy's number its promotion and its place. End each promotion by `end_promotion`.
        `prefetch`: a client wants them there.
        """
        ticket = self._executor.ticket()
        event = ev.PromotionWanted(ticket, [copy.number for copy in copies], prefetch)
        places = cast(dict[int, tuple[int, MemoryPlace]], self._executor.answered_at_once(ticket, event))
        return ticket, places

    def end_promotion(self, ticket: int, promotion: int, *, complete: bool) -> None:
        """`complete`: every byte of it was read and verified."""
        self._executor.post(ev.PromotionEnded(ticket, promotion, complete))

    # ---- storing

    @contextlib.asynccontextmanager
    async def reserved(self, shape: Shape, count: int) -> AsyncIterator[Slots]:
        """Slots of memory, for as long as no chunk has taken them over. Raises `PoolFull`, `LayoutInvalid`."""
        self.check_shape(shape)
        ticket = self._executor.ticket()
        slots = None
        try:
            async with asyncio.timeout(self._wait_s):
                offsets = await self._executor.answer(ticket, ev.Reserved(ticket, shape, count))
            stride = self.arena.slots.layer_stride(shape)
            slots = Slots(ticket, shape, np.array(offsets, dtype=np.int64), stride)
            yield slots
        except TimeoutError:
            if slots is not None:
                raise
            used = self.arena.slots.used_bytes
            raise PoolFull(f"no memory for {count} chunks of {shape.bytes} bytes ({used} in use)") from None
        finally:
            unsettled = slots is not None and slots.unsettled
            self._executor.post(ev.TransferUnsettled(ticket) if unsettled else ev.ReservationEnded(ticket))

    def reserve_now(self, shape: Shape, count: int) -> Slots | None:
        """Slots of memory for chunks of the object tier, if there are any now. End it by `end_load`."""
        ticket = self._executor.ticket()
        try:
            offsets = self._executor.answered_at_once(ticket, ev.Reserved(ticket, shape, count, patient=False))
        except PoolFull:
            return None
        stride = self.arena.slots.layer_stride(shape)
        return Slots(ticket, shape, np.array(offsets, dtype=np.int64), stride)

    def end_load(self, slots: Slots, read: Sequence[tuple[int, Chunk]]) -> None:
        """Keep the chunks that were `read` whole into their slots, by position; the other slots are free."""
        for at, chunk in read:
            self._executor.post(ev.Loaded(chunk, slots.ticket, int(slots.offsets[at])))
        self._executor.post(ev.ReservationEnded(slots.ticket))

    def check_shape(self, shape: Shape) -> None:
        """Check a shape. Raises `LayoutInvalid` for chunks that this node cannot hold."""
        self.arena.check(shape)
        if self.pool is not None:
            self.pool.map.check(shape)

    @contextlib.asynccontextmanager
    async def storing(
        self,
        slots: Slots,
        chunks: Sequence[Chunk],
        level: Durability,
        on_existing: OnExisting = OnExisting.SKIP,
        elsewhere: Sequence[Chunk] = (),
        within: Mapping[bytes, int] | None = None,
    ) -> AsyncIterator[StoredChunks]:
        """Keep chunks whose bytes are in `slots`, in order: readable, on a drive if the level requires it, and indexed.

        Inside, all indexed chunks are pinned. That other nodes or the object tier have them is the caller's matter.
        `elsewhere`: chunks of the object tier to compare with. `within`: by key, the generations of the only entries in
        which copies of another node's chunks may be listed. Raises `ContentConflict`, `PoolFull`,
        `DriveFailed`: then nothing is promised. Chunks that are not indexed are not kept.
        """
        ticket = self._executor.ticket()
        event = ev.StoreOffered(
            ticket=ticket,
            transfer=slots.ticket,
            chunks=chunks,
            offsets=slots.offsets.tolist(),
            level=level,
            on_existing=on_existing,
            generation=int.from_bytes(self._draw(8), "big") | 1,
            elsewhere=elsewhere,
            within=within or {},
        )
        try:
            indexed = cast(set[bytes], await self._executor.answer(ticket, event))
            yield StoredChunks(self, ticket, indexed)
        finally:
            self._executor.post(ev.Unpinned(ticket))

    async def raise_level(self, keys: Sequence[bytes], level: Durability) -> list[bytes]:
        """Put chunks that are here on a drive, and note the level; the keys of those that are on one now.

        Raises `PoolFull`, `DriveFailed`.
        """
        return cast(list[bytes], await self._executor.ask(lambda ticket: ev.LevelRaised(ticket, list(keys), level)))

    async def reregister(self, keys: Sequence[bytes], *, patient: bool = True) -> set[bytes]:
        """Tell the index again of chunks that are here; the keys that are listed. Raises what the index raises.

        `patient`: chunks whose parents are on their way to other nodes are waited for.
        """
        return await self._register(list(keys), patient=patient)

    async def join(self, generations: Mapping[bytes, int]) -> set[bytes]:
        """Have the index list this node for chunks that are here in these very entries, by key.

        Returns the keys that are listed. A copy that is listed in another entry stays so, and is not among them. Raises
        the index's errors.
        """
        return await self._register(list(generations), within=generations)

    async def list_brought(self, generations: Mapping[bytes, int]) -> None:
        """Have the index list this node for chunks that it read from the object tier.

        Copies that a delivery reads from there stay unlisted: they are evicted without a request to the index, and
        later look-ups of the same chunks name the same node.

        Args:
            generations: Of the entries that list the object tier. One that has ended is not made again.

        Raises:
            QuireError: The index does not answer.
        """
        await self._register(list(generations), within=generations, in_object=True)

    async def _register(
        self,
        keys: list[bytes],
        *,
        patient: bool = True,
        within: Mapping[bytes, int] | None = None,
        in_object: bool = False,
    ) -> set[bytes]:
        """Post `RegistrationWanted`; return the keys that are listed."""
        ticket = self._executor.ticket()
        try:
            event = ev.RegistrationWanted(ticket, keys, patient, within or {}, in_object)
            return cast(set[bytes], await self._executor.answer(ticket, event))
        finally:
            self._executor.post(ev.Unpinned(ticket))

    # ---- what goes

    async def drop(self, generations: Mapping[bytes, int]) -> int:
        """Forget copies that were listed under index entries of these generations, which have ended; returns how many.

        For a copy that may have been listed under another entry the index is read first: a listed copy stays. They are
        off the drives when this returns. Raises `DriveFailed`: they may come back with their drive; and the index's
        errors.
        """
        unknown = [key for key in generations if self.residency.recorded(key) == 0]
        if unknown:
            await self.ask_index(unknown)
        dropped = cast(int, await self._executor.ask(lambda ticket: ev.Dropped(ticket, dict(generations))))
        if any(self.residency.may_return(key, generation) for key, generation in generations.items()):
            assert self.pool is not None, "there was a drive"
            raise DriveFailed("copies may come back with a retired drive", self.pool.map.failed_drives())
        return dropped

    async def ask_index(self, keys: Sequence[bytes]) -> set[bytes]:
        """Learn under which entries the index lists chunks that are here; the keys that it lists for this node."""
        listed = await self._registry.generations([chunk.record for chunk in self.find_all(keys)])
        if listed:
            self._executor.post(ev.Listed(listed))
        return set(listed)

    async def evict(
        self, keys: Sequence[bytes], *, keepers: Sequence[str] = (), level: Durability = Durability.MEMORY
    ) -> int:
        """Let chunks go from everywhere, children before parents, as far as the index allows; how many went.

        `keepers`, if there are any: from this node only, copies at `level` at most, where each keeper has them too.
        """
        evicted = 0
        for first in range(0, len(keys), _EVICTED_AT_ONCE):
            part = list(keys[first : first + _EVICTED_AT_ONCE])
            ticket = self._executor.ticket()
            event = ev.EvictionWanted(ticket, part, tuple(keepers), level)
            evicted += cast(int, await self._executor.answer(ticket, event))
        return evicted

    def lose(self, copies: Sequence[Copy]) -> None:
        """Drop copies without a sound byte anywhere: they are unreadable now, and will not be listed."""
        self._executor.post(ev.Lost([copy.number for copy in copies]))

    def hide(self, copy: Copy) -> None:
        """A copy is temporarily unreadable: withdraw it from the index, and keep it."""
        self._executor.post(ev.Hidden(copy.number))

    async def show(self, key: bytes) -> None:
        """Register a hidden copy again, if this node still holds it. Raises the index's errors."""
        if self.residency.generation(key) == 0:
            await self.reregister([key], patient=False)

    def deny(self, records: Sequence[ChunkRecord]) -> None:
        """Tell the index of those among these, which it lists for this node, that are not here."""
        self._executor.post(ev.Denied(records))

    def listed(self, key: bytes) -> tuple[Header, int] | None:
        """Return the header of a chunk that can be read here, and the generation of the index entry that lists it."""
        return self.residency.look(key)

    def wants_object(self, key: bytes) -> bool:
        """Whether a chunk that is here and listed is not in the object tier, as far as is known."""
        return self.residency.wants_object(key)

    def uploaded(self, chunk: Chunk, generation: int) -> None:
        """The object tier has a chunk, and the index entry of that generation lists it there."""
        self._executor.post(ev.Uploaded(chunk, generation))

    async def object_generations(self, records: Sequence[ChunkRecord]) -> dict[bytes, int]:
        """Return the generations of the entries that list chunks in the object tier, 0 where that is unknown."""
        generations = dict.fromkeys([record.key for record in records], 0)
        if not records:
            return generations
        try:
            return generations | (await self._registry.object_generations(records))[0]
        except QuireError as error:
            logger().warning(
                "the index does not give the names of objects: the object tier is searched", error=str(error)
            )
        return generations

    def lay(self, slots: Slots, index: int, payload: Bytes) -> None:
        """Copy a chunk's (L, S) bytes into a slot."""
        places = self.arena.slices(int(slots.offsets[index]), slots.layer_stride, slots.shape)
        for at, row in zip(places.tolist(), payload, strict=True):
            self.arena.view[at : at + slots.shape.slice_bytes] = row


_EVICTED_AT_ONCE: Final = 512


@dataclass(frozen=True, slots=True)
class StoredChunks:
    """Result of a store. `indexed`: keys that the index lists."""

    tiers: Tiers
    ticket: int
    indexed: set[bytes]

    def now(self) -> set[bytes]:
        """Return the keys that can be read here and are listed at this moment: they may be acknowledged."""
        return self.tiers.residency.acknowledged(self.ticket) & self.indexed
