"""Long random histories of a node: longer than hypothesis makes them, and by far cheaper; a seed repeats one."""

from __future__ import annotations

import random
from typing import Any, Final

from quire.model.durability import Durability, OnExisting
from quire_storage.core.chunks import Copy, MemoryPlace
from quire_storage.core.residency import events as ev
from quire_storage.core.residency.invariants import under_way
from tests.unit.storage.residency_world import Operation, World, chunk_of, content_of

STEPS: Final = 150
CHUNKS: Final = 16
_OF_DRIVES: Final = ("write", "headers", "forget")


def _of(content: str) -> str:
    """Return which chunk a slot's content is of, whatever its version."""
    return content.partition("/")[0]


class History:
    """What clients, peers, the index and drives do to a node, at random. `World.post` checks after each event."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._world = World(drives=seed % 3, objects=seed % 2 == 0, arena_slabs=1 + seed % 4, drive_slabs=1 + seed % 2)
        self._world.proposes = lambda: self._random.random() < 0.5
        self._stores: list[tuple[int, int]] = []
        self._readers: list[int] = []
        self._to_answer: list[int] = []
        self._following: dict[int, dict[int, str]] = {}

    def run(self) -> None:
        steps = [
            *[self._store] * 4,
            *[self._end_operation] * 8,
            *[self._end_store] * 3,
            *(self._follow, self._follow),
            *(self._pin, self._pin, self._unpin, self._unpin, self._promote, self._drop, self._drop, self._lose),
            *(
                self._deny,
                self._evict,
                self._raise,
                self._register,
                self._list_brought,
                self._copy,
                self._lease,
                self._pass_time,
                self._learn,
            ),
        ]
        for _ in range(STEPS):
            self._random.choice(steps)()
        self._end()

    def _end(self) -> None:
        """Everything is let go; then nothing is under way, and every drop was answered."""
        self._world.leased.clear()
        while self._stores:
            self._end_store()
        self._world.settle()
        while self._readers:
            self._unpin()
        self._world.settle()
        missing = [ticket for ticket in self._to_answer if ticket not in self._world.answers]
        assert not missing, f"what is asked is answered: {missing}"
        stopping = self._world.ticket()
        self._world.post(ev.Stopping(stopping))
        self._world.settle()
        assert stopping in self._world.answers, "it stops"
        machine = self._world.residency
        assert not under_way(machine), f"left behind: {under_way(machine)}"
        keys = machine.keys()
        here = {key: machine.generation(key) for key in keys}
        listed = {key: self._world.index[key] for key in self._world.listed_here}
        assert listed.keys() <= here.keys(), "what the index lists is here"
        assert all(listed.get(key) == generation for key, generation in here.items() if generation), (
            "and is known to be"
        )

    def _key(self) -> bytes:
        return chunk_of(self._random.randrange(CHUNKS)).key

    def _store(self) -> None:
        first = self._random.randrange(CHUNKS)
        version = self._random.choice([0, 0, 0, 1])
        chunks = [chunk_of(number, version) for number in range(first, first - first % 4 + 4)]
        level, existing = self._random.choice(list(Durability)), self._random.choice(list(OnExisting))
        transfer, store = self._world.store(chunks, level, existing)
        if store:
            self._stores.append((transfer, store))

    def _copy(self) -> None:
        """Chunks of another node arrive; the entries that list it may have ended since they were asked for."""
        world, first = self._world, self._random.randrange(CHUNKS) & ~1
        chunks = [chunk_of(number) for number in (first, first + 1)]
        for chunk in chunks:
            if chunk.key not in world.index and self._random.random() < 0.5:
                world.index[chunk.key] = world._next_generation()
        within = {chunk.key: world.index.get(chunk.key, 3) for chunk in chunks}
        transfer, store = world.store(chunks, Durability.REPLICATED, within=within)
        if store:
            self._stores.append((transfer, store))
            if chunks[0].key not in world.listed_here and self._random.random() < 0.2:
                world.ended(chunks[0].key)

    def _end_store(self) -> None:
        if self._stores:
            transfer, store = self._stores.pop(0)
            self._world.post(ev.Unpinned(store))
            last = self._random.random() < 0.1
            self._world.post(ev.TransferUnsettled(transfer) if last else ev.ReservationEnded(transfer))

    def _end_operation(self) -> None:
        if self._world.running:
            operation = self._random.choice(self._world.running)
            fails = self._random.random() < (0.02 if operation.name in _OF_DRIVES else 0.25)
            self._world.end(operation, fail=fails)

    def _pin(self) -> None:
        numbers = self._random.sample(range(CHUNKS), 3)
        ticket = self._world.pin(numbers)
        if self._random.random() < 0.5:
            self._world.load(numbers)
        self._readers.append(ticket)
        if held := self._world.held.get(ticket):
            more = self._world.ticket()
            self._world.post(ev.PinnedAlso(more, held[0].number))
            self._readers.append(more)

    def _follow(self) -> None:
        """Deliveries join a store that runs, and read its slots until they end, whatever becomes of it."""
        world = self._world
        if not self._stores:
            return
        transfer, _ = self._random.choice(self._stores)
        chunks, offsets = world.transfers[transfer]
        holder = world.pin([])
        ticket = world.ticket()
        world.post(ev.Followed(ticket, holder, transfer, [chunk.key for chunk in chunks], offsets))
        joined: Any = world.answers[ticket]
        self._readers.append(holder)
        # A slot that was freed may be one of the same chunk again: then it has the bytes that are kept of it.
        self._following[holder] = {offsets[at]: world.memory[offsets[at]] for at in joined}
        assert all(_of(world.memory[offsets[at]]) == _of(content_of(chunks[at])) for at in joined), "the chunk's slot"

    def _unpin(self) -> None:
        if self._readers:
            ticket = self._readers.pop(self._random.randrange(len(self._readers)))
            for offset, content in self._following.pop(ticket, {}).items():
                assert self._world.memory[offset] == content, "a follower reads the bytes of its store"
            self._world.held.pop(ticket, None)
            self._world.post(ev.Unpinned(ticket))

    def _held(self) -> list[Copy]:
        held = [copies for copies in self._world.held.values() if copies]
        return self._random.choice(held) if held else []

    def _promote(self) -> None:
        pool = self._world.pool
        failed = pool.failed_drives() if pool is not None else frozenset()
        on_drives = [each for each in self._held() if each.disk is not None and each.disk.drive not in failed]
        copies = {copy.number: copy for copy in on_drives if copy.memory is None}
        if not copies:
            return
        ticket, holder = self._world.ticket(), self._world.ticket()
        for number in copies:
            self._world.post(ev.PinnedAlso(holder, number))
        self._world.post(ev.PromotionWanted(ticket, list(copies), self._random.random() < 0.5))
        places: Any = self._world.answers[ticket]
        waiting = {promotion for promotion, _ in places.values()}
        for promotion in sorted(waiting):
            mine = {copies[number]: place for number, (of, place) in places.items() if of == promotion}
            self._read(ticket, promotion, mine, waiting, holder)
        if not waiting:
            self._world.post(ev.Unpinned(holder))

    def _read(
        self, ticket: int, promotion: int, places: dict[Copy, MemoryPlace], waiting: set[int], holder: int
    ) -> None:
        """Copies into the slots of a promotion, while other things happen; its holder lets go after the last one."""
        world = self._world

        def end(complete: bool) -> None:
            readable = [copy for copy in places if copy.disk is not None and not world._failed(copy.disk.drive)]
            if len(readable) == len(places) and complete:
                for copy, place in places.items():
                    assert copy.disk is not None
                    world.memory[place.offset] = world.disk[copy.disk.drive, copy.disk.offset]
            world.post(ev.PromotionEnded(ticket, promotion, complete and len(readable) == len(places)))
            waiting.discard(promotion)
            if not waiting:
                world.post(ev.Unpinned(holder))

        world.running.append(Operation("read", lambda: end(True), lambda: end(False)))

    def _ask(self) -> int:
        self._to_answer.append(self._world.ticket())
        return self._to_answer[-1]

    def _drop(self) -> None:
        """Index entries have ended, one of them long ago."""
        keys = [self._key() for _ in range(self._random.randint(1, 3))]
        ended = {key: self._world.ended(key) for key in dict.fromkeys(keys)}
        generations = {key: generation for key, generation in ended.items() if generation is not None}
        if self._random.random() < 0.2 and self._world.residency.generation(key := self._key()):
            generations.setdefault(key, 1)
        if generations:
            self._world.post(ev.Dropped(self._ask(), generations))

    def _learn(self) -> None:
        """The index was asked under which entries it lists some chunks for this node."""
        world, keys = self._world, {self._key() for _ in range(3)}
        world.post(ev.Listed({key: world.index[key] for key in sorted(keys & world.listed_here & world.index.keys())}))

    def _lose(self) -> None:
        if copies := self._held():
            self._world.post(ev.Lost([copies[0].number]))

    def _deny(self) -> None:
        self._world.post(ev.Denied([chunk_of(self._random.randrange(CHUNKS)).record]))

    def _evict(self) -> None:
        keepers: tuple[str, ...] = self._random.choice([(), ("b",)])
        level = self._random.choice(list(Durability))
        self._world.post(ev.EvictionWanted(self._ask(), [self._key(), self._key()], keepers, level))

    def _raise(self) -> None:
        level = self._random.choice(list(Durability))
        self._world.post(ev.LevelRaised(self._ask(), [self._key()], level))

    def _register(self) -> None:
        self._readers.append(self._ask())
        self._world.post(ev.RegistrationWanted(self._readers[-1], [self._key()], self._random.random() < 0.5))

    def _list_brought(self) -> None:
        """Copies were read from the object tier; the entry of one of them may have ended since."""
        world = self._world
        keys = [key for key in (self._key(), self._key()) if key in world.listed_objects and key in world.index]
        within = {key: world.index[key] + (self._random.random() < 0.2) for key in keys}
        if within:
            self._readers.append(self._ask())
            world.post(ev.RegistrationWanted(self._readers[-1], list(within), within=within, in_object=True))

    def _lease(self) -> None:
        self._world.leased ^= {self._key()}

    def _pass_time(self) -> None:
        self._world.now_s += self._random.choice([1.0, 1.0, 20.0])
        self._world.post(ev.TimePassed())
