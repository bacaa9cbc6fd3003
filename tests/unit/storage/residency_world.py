"""A node around the residency machine, without time: a test says what ends when, and in which order.

Bytes are names: a slot holds the name of the content that was last moved there. They move when an operation ends, not
when it begins, so that a slot which changes hands in between is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from quire.model.durability import Durability, OnExisting
from quire.model.errors import MetadataUnavailable, QuireError
from quire.model.fingerprints import fingerprint
from quire.model.index import DIGEST_MODULUS, listing_number
from quire.model.records import ChunkRecord
from quire_storage.core.chunks import Chunk, Copy, Placed
from quire_storage.core.pool.format import PAGE_BYTES, DriveGeometry
from quire_storage.core.pool.map import PoolMap
from quire_storage.core.pool.slots import Shape, SlotAllocator
from quire_storage.core.residency import Residency, ResidencySettings
from quire_storage.core.residency import events as ev
from quire_storage.core.residency.invariants import check
from quire_storage.errors import DriveFailed
from tests.unit.storage.residency_answers import Answers

SLAB = 1 << 14
_ORDERED = ("headers", "forget")
_ANSWERS_EACH = 10
SHAPES = (Shape(1, 4096), Shape(2, 4096))


def chunk_of(number: int, version: int = 0) -> Chunk:
    """Chunks are in chains of four; even chains have another shape than odd ones."""
    start, shape = number - number % 4, SHAPES[number // 4 % 2]
    key, parent = number.to_bytes(32, "big"), (number - 1).to_bytes(32, "big") if number % 4 else b""
    opener = start.to_bytes(32, "big")
    record = ChunkRecord(key, parent, opener, opener if parent else b"")
    sums = np.full(shape.num_layers, number * 10 + version, dtype=np.uint32)
    return Chunk(record, shape.num_layers, shape.slice_bytes, sums)


def content_of(chunk: Chunk) -> str:
    return f"{chunk.key.hex()[-4:]}/{int(chunk.checksums[0])}"


@dataclass(slots=True)
class Operation:
    """Something under way. `end` makes it happen; `fail` too, where it can."""

    name: str
    end: Callable[[], None]
    fail: Callable[[], None] | None = None


class World:
    """`drives`: how many; 0 for a node of memory only. `held`: copies that readers hold, by ticket."""

    def __init__(
        self,
        *,
        drives: int,
        objects: bool,
        arena_slabs: int = 3,
        drive_slabs: int = 3,
        settings: ResidencySettings | None = None,
    ) -> None:
        geometry = DriveGeometry(SLAB, drive_slabs, 8)
        images = [np.zeros(geometry.header_pages * PAGE_BYTES, dtype=np.uint8) for _ in range(drives)]
        self.pool = PoolMap([geometry] * drives, images, 4096) if drives else None
        arena = SlotAllocator(arena_slabs * SLAB, SLAB)
        self.residency = Residency(settings or ResidencySettings(), arena, self.pool, objects=objects)
        self._told = Answers(self.residency)
        self.has_objects = objects
        self.proposes: Callable[[], bool] = lambda: True
        self.memory: dict[int, str] = {}
        self.disk: dict[tuple[int, int], str] = {}
        self.objects: dict[bytes, Chunk] = {}
        self.listed_objects: set[bytes] = set()
        self.uploads: dict[bytes, Operation] = {}
        self.uploaded: dict[bytes, int] = {}
        self.running: list[Operation] = []
        self.answers: dict[int, object] = {}
        self.held: dict[int, list[Copy]] = {}
        self.transfers: dict[int, tuple[list[Chunk], list[int]]] = {}
        self.registrations: dict[int, list[ChunkRecord]] = {}
        self.index: dict[bytes, int] = {}
        self.listed_here: set[bytes] = set()
        self.leased: set[bytes] = set()
        self.acknowledged: dict[bytes, Chunk] = {}
        self.events = 0
        self._tickets = self._generations = 0
        self.now_s = 0.0

    # ---- what tests do

    def ended(self, key: bytes) -> int | None:
        """The index entry of a key ends: its generation."""
        self.acknowledged.pop(key, None)
        self.listed_here.discard(key)
        return self.index.pop(key, None)

    def post(self, event: ev.Event) -> None:
        self.events += 1
        self._told.before(event)
        instructions = self.residency.handle(event, self.now_s)
        self._told.after(event, instructions)
        for instruction in instructions:
            self._begin(instruction)
        said = self.residency.generation
        self.uploaded = {key: at for key, at in self.uploaded.items() if said(key) == at}
        self.check()

    def ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def pass_time(self) -> None:
        """Ranges that were registered until now have waited long enough for others that extend them."""
        self.now_s += 10.0
        self.post(ev.TimePassed())

    def store(
        self,
        chunks: list[Chunk],
        level: Durability,
        on_existing: OnExisting = OnExisting.SKIP,
        elsewhere: Sequence[Chunk] = (),
        within: Mapping[bytes, int] | None = None,
    ) -> tuple[int, int]:
        """Reserve slots, lay the bytes, offer: transfer and store, unless there is no memory (store is 0)."""
        transfer = self.ticket()
        self.post(ev.Reserved(transfer, chunks[0].shape, len(chunks)))
        if not isinstance(self.answers.get(transfer), list):
            self.post(ev.ReservationEnded(transfer))
            return transfer, 0
        offsets = self.answers[transfer]
        assert isinstance(offsets, list)
        for chunk, offset in zip(chunks, offsets, strict=True):
            self.memory[offset] = content_of(chunk)
        self.transfers[transfer] = chunks, offsets
        store = self.ticket()
        self.post(
            ev.StoreOffered(
                ticket=store,
                transfer=transfer,
                chunks=chunks,
                offsets=offsets,
                level=level,
                on_existing=on_existing,
                generation=self._next_generation() if self.proposes() else 0,
                elsewhere=elsewhere,
                within=within or {},
            )
        )
        return transfer, store

    def load(self, numbers: list[int]) -> None:
        """Begin to read those that the object tier has into slots, if there is memory now."""
        chunks = [chunk for number in numbers if (chunk := self.objects.get(chunk_of(number).key)) is not None]
        for shape in dict.fromkeys(chunk.shape for chunk in chunks):
            group, transfer = [chunk for chunk in chunks if chunk.shape == shape], self.ticket()
            self.post(ev.Reserved(transfer, shape, len(group), patient=False))
            offsets = self.answers[transfer]
            if isinstance(offsets, list):
                loaded = list(zip(group, offsets, strict=True))
                self._run("load", partial(self._loaded, transfer, loaded), partial(self._loaded, transfer, []))
            else:
                self.post(ev.ReservationEnded(transfer))

    def _loaded(self, transfer: int, loaded: list[tuple[Chunk, int]]) -> None:
        for chunk, offset in loaded:
            self.memory[offset] = content_of(chunk)
            self.post(ev.Loaded(chunk, transfer, offset))
        self.post(ev.ReservationEnded(transfer))

    def forget_evicted(self) -> None:
        """Clear the memory tier's lists of evicted chunks."""
        order, keys = self.residency.in_memory, [chunk_of(number).key for number in range(64)]
        for key in filter(order.went_lately, keys):
            order.insert(key, b"", 0)
            order.remove(key)

    def drop(self, *keys: bytes) -> int:
        """The entries under which these were listed have ended; the ticket."""
        ticket = self.ticket()
        self.post(ev.Dropped(ticket, {key: self.residency.recorded(key) or 1 for key in keys}))
        return ticket

    def _next_generation(self) -> int:
        self._generations += 1 << 16  # digests of listings are of the upper bits
        return self._generations

    def acknowledge(self, transfer: int, store: int) -> set[bytes]:
        """The end of a store that was answered; the keys that its client is told are stored."""
        keys = self.residency.acknowledged(store) if not isinstance(self.answers.get(store), QuireError) else set()
        for key in keys:
            found = self.residency.look(key)
            assert found is not None and key in self.index, "acknowledged means readable and indexed at that moment"
            self.acknowledged[key] = found[0].chunk
        self.post(ev.Unpinned(store))
        self.post(ev.ReservationEnded(transfer))
        return keys

    def pin(self, numbers: list[int]) -> int:
        ticket = self.ticket()
        self.post(ev.Pinned(ticket, [chunk_of(number).key for number in numbers], True))
        return ticket

    def operation(self, name: str) -> Operation:
        """The first of that name that is under way."""
        return next(each for each in self.running if each.name == name)

    def end(self, operation: Operation, *, fail: bool = False) -> None:
        """Headers are written and zeroed in the order in which that was asked for: of these the first one ends."""
        if operation.name in _ORDERED:
            operation = next(each for each in self.running if each.name in _ORDERED)
        self.running.remove(operation)
        (operation.fail if fail and operation.fail is not None else operation.end)()

    def settle(self) -> None:
        """Let everything end, until nothing is under way."""
        for _ in range(40):  # what is refused now is asked for again later
            for _ in range(2_000):
                if not self.running:
                    break
                self.end(self.running[0])
            assert not self.running, "it never ends"
            self.now_s += 1.0
            self.post(ev.TimePassed())
            if not self.running:
                return

    def read(self, copy: Copy) -> str:
        """What a reader of a held copy gets."""
        if copy.memory is not None:
            return self.memory[copy.memory.offset]
        assert copy.disk is not None
        return self.disk[copy.disk.drive, copy.disk.offset]

    def check(self) -> None:
        """The machine's invariants; and the bytes of what is held, and of what lies on the drives under a header."""
        check(self.residency)
        assert all(key in self.residency for key in self.uploads), "what is gone is not uploaded"
        if self.events % _ANSWERS_EACH == 0:
            self._check_answers()
        for copies in self.held.values():
            for copy in copies:
                failed = copy.memory is None and copy.disk is not None and self._failed(copy.disk.drive)
                assert failed or self.read(copy) == content_of(copy.chunk), "a reader's bytes were overwritten"
        for key in self.pool.keys() if self.pool is not None else ():
            placed = self.pool.get(key) if self.pool is not None else None
            assert placed is not None
            found = self.disk.get((placed.place.drive, placed.place.offset))
            assert found == content_of(placed.header.chunk), "a header that names other bytes"

    def _check_answers(self) -> None:
        """What the machine says of itself is one story, whichever way it is asked."""
        machine, here = self.residency, self.residency.keys()
        assert len(here) == len(set(here)), "each key once"
        assert {key for part in machine.scan() for key in part} >= set(here), "a walk names what stays"
        readable = {key: found for key in here if (found := machine.look(key)) is not None}
        assert readable.keys() == {key for key in here if key in machine} == set(here), "what can be read can be found"
        for key in (chunk_of(number).key for number in range(64)):
            if key not in readable:
                told = (machine.look(key), machine.generation(key), machine.age(key), machine.in_object(key))
                assert told == (None, None, None, False) and key not in machine, "of what is not here nothing is said"
        for key, (header, generation) in readable.items():
            assert header.chunk.key == key
            assert machine.generation(key) == generation
            assert machine.in_object(key) == (key in self.uploaded), "in the object tier, and listed there"
            assert machine.wants_object(key) == (self.has_objects and generation > 0 and not machine.in_object(key))
        off_drives = sum(entry.disk is None for entry in machine.copies.entries.values())
        assert len(machine) == off_drives + (len(self.pool) if self.pool is not None else 0)
        in_order = [chunk.key for chunk in machine.off_drives()]
        in_memory = set(in_order)
        on_drives = {key for key in readable if self.pool is not None and key in self.pool} - in_memory
        assert in_memory | on_drives == readable.keys()
        ages = {key: age for key in readable if (age := machine.age(key)) is not None}
        assert ages.keys() == readable.keys() and len(set(ages.values())) == len(ages), "no two have one age"
        assert all(ages[old] < ages[new] for old in on_drives for new in in_memory), "what is on no drive is youngest"
        assert in_order == sorted(in_order, key=ages.__getitem__), "in the order of storing"
        listed = [(key, generation) for key, (_, generation) in readable.items() if generation]
        assert machine.listed_count == len(listed)
        assert (
            machine.listed_digest
            == sum(listing_number(fingerprint(key), each) for key, each in listed) % DIGEST_MODULUS
        )

    # ---- what the machine asks for

    def _failed(self, drive: int) -> bool:
        return self.pool is not None and drive in self.pool.failed_drives()

    def _begin(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Complete(ticket, value):
                self.answers[ticket] = value
                if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], list):
                    self.held[ticket] = value[0]
            case ev.Fail(ticket, error):
                self.answers[ticket] = error
            case ev.Write():
                self._run("write", lambda: self._write(instruction), lambda: self._fail_drive(instruction))
            case ev.WriteHeaders():
                self._run("headers", lambda: self._write_headers(instruction), lambda: self._fail_headers(instruction))
            case ev.Forget(removal, placed):
                self._run("forget", lambda: self._forget(removal, list(placed)), lambda: self._fail_forget(instruction))
            case ev.Register(ticket, records, _, fresh, within, in_object):
                self.registrations[ticket] = list(records)
                join = partial(self._join, ticket, within, in_object)
                answer = join if within else partial(self._register, ticket, fresh)
                self._run("register", answer, lambda: self._refuse(ticket))
            case ev.Withdraw(records):
                self._run("withdraw", lambda: self._withdraw([record.key for record in records]))
            case ev.AskToEvict(question, records):
                keys = [record.key for record in records]
                self._run("ask", lambda: self._answer(question, keys), lambda: self._answer(question, []))
            case ev.AskToWithdraw(question, records, keepers):
                keys = [record.key for record in records]
                of_object = not keepers
                self._run(
                    "withdraw",
                    lambda: self._let_go(question, keys, self.listed_objects, of_object),
                    lambda: self._let_go(question, keys, set(), of_object),
                )
            case ev.Upload(key, _, _):
                if key not in self.uploads:
                    self.uploads[key] = self._run("upload", lambda: self._upload(key))
            case ev.CancelUpload(key):
                if (upload := self.uploads.pop(key, None)) is not None:
                    self.running.remove(upload)

    def _run(self, name: str, end: Callable[[], None], fail: Callable[[], None] | None = None) -> Operation:
        self.running.append(Operation(name, end, fail))
        return self.running[-1]

    def _write(self, write: ev.Write) -> None:
        assert self.pool is not None
        if any(self._failed(placed.place.drive) for placed in write.placed):
            self.post(ev.WriteFailed(write.write, DriveFailed("it has failed", self.pool.failed_drives())))
            return
        for placed, source in zip(write.placed, write.sources, strict=True):
            self.disk[placed.place.drive, placed.place.offset] = self.memory[source.offset]
        self.pool.commit(list(write.placed))
        self.post(ev.Written(write.write))

    def _lose_drive(self, placed: Placed) -> DriveFailed:
        drive = placed.place.drive
        if not self._failed(drive):
            self.post(ev.DriveLost(drive))
        return DriveFailed("it has failed", frozenset({drive}))

    def _fail_drive(self, write: ev.Write) -> None:
        """The map knows of headers before they are written: it may name what the drive never had."""
        assert self.pool is not None
        drive = write.placed[0].place.drive
        if write.write % 2 and not self._failed(drive):
            self.pool.commit([each for each in write.placed if each.place.drive == drive])
        self.post(ev.WriteFailed(write.write, self._lose_drive(write.placed[0])))

    def _fail_headers(self, write: ev.WriteHeaders) -> None:
        self._lose_drive(write.placed[0])
        self._write_headers(write)

    def _fail_forget(self, forget: ev.Forget) -> None:
        self._lose_drive(forget.placed[0])
        self._forget(forget.removal, list(forget.placed))

    def _write_headers(self, write: ev.WriteHeaders) -> None:
        assert self.pool is not None
        self.pool.commit([placed for placed in write.placed if not self._failed(placed.place.drive)])
        failed = frozenset(each.place.drive for each in write.placed if self._failed(each.place.drive))
        self.post(
            ev.WriteFailed(write.write, DriveFailed("it has failed", failed)) if failed else ev.Written(write.write)
        )

    def _forget(self, removal: int, placed: list[Placed]) -> None:
        assert self.pool is not None
        self.pool.forget([each for each in placed if not self._failed(each.place.drive)])
        failed = frozenset(each.place.drive for each in placed if self._failed(each.place.drive))
        self.post(ev.Forgotten(removal, DriveFailed("it has failed", failed) if failed else None))

    def _register(self, ticket: int, fresh: int) -> None:
        generations, fresh = {}, fresh or self._next_generation()
        for record in self.registrations[ticket]:
            if record.key not in self.index:
                self.index[record.key] = fresh
            generations[record.key] = self.index[record.key]
            self.listed_here.add(record.key)
        self.post(ev.Indexed(ticket, generations))
        self.post(ev.IndexingEnded(ticket))

    def _join(self, ticket: int, within: Sequence[int], in_object: bool) -> None:
        pairs = [(record.key, each) for record, each in zip(self.registrations[ticket], within, strict=True)]
        generations = {key: each for key, each in pairs if self.index.get(key) == each}
        self.listed_here |= generations.keys()
        if in_object:
            self.uploaded |= generations  # of those that the machine takes as listed
        self.post(ev.Indexed(ticket, generations))
        self.post(ev.IndexingEnded(ticket))

    def _refuse(self, ticket: int) -> None:
        self.post(ev.IndexingEnded(ticket, MetadataUnavailable("it does not answer") if ticket % 2 else None))

    def _withdraw(self, keys: list[bytes]) -> None:
        for key in keys:
            self.ended(key)
        self.post(ev.Withdrawn(keys))

    def _answer(self, question: int, keys: list[bytes]) -> None:
        out = frozenset(key for key in keys if key not in self.leased)
        for key in out:
            self.ended(key)
        self.post(ev.Answered(question, out))

    def _let_go(self, question: int, keys: list[bytes], listed: set[bytes], of_object: bool) -> None:
        """The index takes this node off the entries that list the object tier; those are read from there."""
        out = frozenset(key for key in keys if key in listed)
        if of_object:  # what is not listed there after all is to be uploaded again
            self.uploaded = {key: at for key, at in self.uploaded.items() if key not in keys}
        for key in out:
            self.acknowledged.pop(key, None)
            self.listed_here.discard(key)
        self.post(ev.Answered(question, out))

    def _upload(self, key: bytes) -> None:
        del self.uploads[key]
        found = self.residency.look(key)
        if found is not None and found[1]:
            self.objects[key] = found[0].chunk
            self.listed_objects.add(key)
            self.uploaded[key] = found[1]
            self.post(ev.Uploaded(found[0].chunk, found[1]))
            told = self.residency.look(key)
            assert told is not None and told[0].in_object, "an object of it was written"

    def numbers_here(self) -> Iterator[int]:
        return (int.from_bytes(key, "big") for key in list(self.residency.keys()))


def stored(world: World, chunks: list[Chunk], level: Durability = Durability.LOCAL) -> None:
    """A store that is acknowledged."""
    transfer, store = world.store(chunks, level)
    world.settle()
    assert len(world.acknowledge(transfer, store)) == len(chunks)
    world.settle()


def stored_in_memory(world: World, chunks: list[Chunk]) -> None:
    """A store that is acknowledged, while its chunks are being written to a drive by themselves."""
    transfer, store = world.store(chunks, Durability.MEMORY)
    world.end(world.operation("register"))
    assert len(world.acknowledge(transfer, store)) == len(chunks)
