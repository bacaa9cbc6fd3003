"""Every order of events of a tiny cluster: two nodes, an object tier, an index, two clients, two chunks.

The machines are the real ones: `Residency`, the orchestrator's decisions on evictions, and the index's semantics
(`MemoryIndex`, held by the contract suite that holds Redis). What lies between them, messages and the executor, is
modelled as operations of one or more steps, and any of them may take its next step at any time. A state is a value:
it is copied, compared with all that were seen (but for the names of tickets and generations), and followed further,
breadth first, so that a broken promise is told by the shortest story.
"""

from __future__ import annotations

import argparse
import copyreg
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from types import MethodType
from typing import Any, Final

import numpy as np

from quire.durability import Durability, OnExisting
from quire.errors import QuireError
from quire.keys import ChunkKeys
from quire.metadata.index import OBJECT_TIER, ChunkRecord, ObjectMark
from quire.testing.index import IndexState, MemoryIndex
from quire_orchestrator.core.eviction import drops
from quire_storage.core import events as ev
from quire_storage.core.chunks import Chunk, Copy
from quire_storage.core.pool_format import PAGE_BYTES, Geometry
from quire_storage.core.pool_map import PoolMap
from quire_storage.core.residency import Residency, ResidencySettings
from quire_storage.core.slots import Shape, SlotAllocator
from tests.simulation.mutations import MUTATIONS

_SHAPE: Final = Shape(1, 4096)
_SLAB: Final = 2 * 4096
_GENERATIONS: Final = 1 << 60
_NAMED: Final = 1 << 39
"""Numbers from here on are names of tickets or generations: which ones they are is of no importance."""
_KEYS: Final = (b"A" * 32, b"B" * 32)
_RECORDS: Final = (
    ChunkRecord(_KEYS[0], b"", _KEYS[0], b""),
    ChunkRecord(_KEYS[1], _KEYS[0], _KEYS[0], _KEYS[0]),
)
_LEASE: Final = b"lease"
_NO_ERROR: Final = QuireError("the message was lost")


def _chunk(number: int, version: int) -> Chunk:
    sums = np.array([number * 10 + version], dtype=np.uint32)
    return Chunk(_RECORDS[number], 1, 4096, sums)


def _content(chunk: Chunk) -> int:
    return int(chunk.checksums[0])


@dataclass(frozen=True, slots=True)
class Store:
    """The first `count` chunks of the prefix, at one node. `version`: which bits."""

    node: int
    count: int
    level: Durability
    version: int = 0


@dataclass(frozen=True, slots=True)
class Evict:
    """All but the first `keep`."""

    keep: int = 0


@dataclass(frozen=True, slots=True)
class Read:
    """What a look-up finds of the prefix, under a lease, at one node that is listed, or at `node`."""

    node: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """`before`: done in order, to its end, before the clients begin. The numbers say how often what may happen.

    `emptied`: the index loses everything; `sweeps`: the objects' time of grace is over.
    """

    name: str
    clients: tuple[tuple[Store | Evict | Read, ...], ...]
    before: tuple[Store | Evict | Read, ...] = ()
    drives: bool = False
    slabs: int = 2
    crashes: int = 0
    losses: int = 0
    sweeps: int = 0
    emptied: int = 0


class _Index(MemoryIndex):
    """Draws generations one after the other: their order is forgotten when states are compared."""

    def __init__(self) -> None:
        self.state = IndexState(epoch="first")
        self.drawn = _GENERATIONS

    def _draw(self) -> int:
        self.drawn += 1
        return self.drawn


class Broken(Exception):
    """A promise was broken."""


def _now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the index in memory waits for nothing")


@dataclass(slots=True)
class _Node:
    """A node's process and its drive. `unsent`, `sending`: keys on their way to the object tier."""

    number: int
    residency: Residency | None = None
    incarnation: int = 0
    memory: dict[int, int] = field(default_factory=dict)
    disk: dict[int, int] = field(default_factory=dict)
    image: Any = None
    unsent: dict[bytes, None] = field(default_factory=dict)
    sending: set[bytes] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"storage-{self.number}"


@dataclass(slots=True)
class _Client:
    """`at`: which of its operations is next. `running`: it waits for an answer."""

    script: tuple[Store | Evict | Read, ...]
    at: int = 0
    running: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """Something under way takes its next step: `what`, at a node's `incarnation` (0: at no node's)."""

    what: str
    node: int
    incarnation: int
    arguments: tuple[Any, ...]


class Cluster:
    """One state. `promises`: what was acknowledged: generation and level, by key."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.index = _Index()
        self.objects: dict[bytes, Chunk] = {}
        self.nodes = [_Node(0), _Node(1)]
        self.steps: list[Step] = []
        self.clients = [_Client(script) for script in scenario.clients]
        self.promises: dict[bytes, tuple[int, Durability]] = {}
        self.crashes, self.losses = scenario.crashes, scenario.losses
        self.sweeps, self.emptied = scenario.sweeps, scenario.emptied
        self.damaged = False
        self._tickets = _NAMED
        for node in self.nodes:
            self._boot(node)
        before = _Client(scenario.before)
        self.clients.append(before)
        while before.at < len(before.script):
            self._begin(len(self.clients) - 1)
            self.settle()
        self.clients.pop()

    # ---- what may happen next

    def choices(self) -> Iterator[tuple[str, ...]]:
        for number, client in enumerate(self.clients):
            if not client.running and client.at < len(client.script):
                yield ("begin", str(number))
        for at, step in enumerate(self.steps):
            if self._may(step):
                yield ("step", str(at))
                if self.losses and step.what in _ANSWERS:
                    yield ("lose", str(at))
        for node in self.nodes:
            if node.residency is None:
                yield ("restart", str(node.number))
            elif self.crashes:
                yield ("crash", str(node.number))
        if self.sweeps and self.index.state.objects and not self._is_writing():
            yield ("sweep",)
        if self.emptied:
            yield ("empty",)

    def _is_writing(self) -> bool:
        """Whether an object is being written: that takes less than the time of grace."""
        alive = {(node.number, node.incarnation) for node in self.nodes}
        return any(step.what in _WRITING and (step.node, step.incarnation) in alive for step in self.steps)

    @property
    def is_over(self) -> bool:
        return not self.steps and all(client.at == len(client.script) for client in self.clients)

    def take(self, choice: tuple[str, ...]) -> str:
        """Let it happen, and look at every promise; what happened, in words."""
        what = " ".join(choice)
        match choice:
            case ("begin", number):
                what = f"client {number} begins {self.clients[int(number)].script[self.clients[int(number)].at]}"
                self._begin(int(number))
            case ("step", at):
                step = self.steps.pop(int(at))
                what = _told(step)
                self._take(step)
            case ("lose", at):
                step = self.steps.pop(int(at))
                what = f"lost: {_told(step)}"
                self.losses -= 1
                self._lose(step)
            case ("crash", number):
                self.crashes -= 1
                self._crash(self.nodes[int(number)])
            case ("restart", number):
                self._boot(self.nodes[int(number)])
                self._reconcile(self.nodes[int(number)])
            case ("sweep",):
                self.sweeps -= 1
                self._sweep()
            case ("empty",):
                self.emptied -= 1
                self._empty()
        self.check()
        return what

    def check(self) -> None:
        for node in self.nodes:
            if node.residency is not None:
                node.residency.check()
        if not self.damaged:
            for key, (generation, level) in self.promises.items():
                self._check_promise(key, generation, level)

    def settle(self) -> None:
        """Let everything that is under way come to its end, in the order in which it began."""
        for _ in range(500):
            ready = next((step for step in self.steps if self._may(step)), None)
            if ready is None:
                assert not self.steps, f"it never ends: {self.steps}"
                return
            self.steps.remove(ready)
            self._take(ready)
        raise Broken(f"it never ends: {[_told(step) for step in self.steps]}")

    def finish(self) -> None:
        """Everything is over: what is left of it."""
        for node in self.nodes:
            if node.residency is None:
                self._boot(node)
        for _ in range(3):
            for node in self.nodes:
                self._post(node, ev.TimePassed())
                self._reconcile(node)
            self.settle()
            self._sweep()
            self.settle()
        self.damaged = False
        self.check()
        self._check_agreement()

    def _check_agreement(self) -> None:
        listed = self.index.state.entries
        for node in self.nodes:
            assert node.residency is not None
            if left := node.residency.busy():
                raise Broken(f"{node.name} is left with {left}")
            here, there = set(node.residency.keys()), {key for key, each in listed.items() if node.name in each.nodes}
            orphans = {record.key for record in _RECORDS if record.parent and record.parent not in listed}
            if here - orphans != there:
                raise Broken(f"{node.name} has {_names(here)} and is listed for {_names(there)}")
        objects = {key for key, each in listed.items() if OBJECT_TIER in each.nodes}
        if objects != set(self.objects):
            raise Broken(f"objects {_names(self.objects)}, listed {_names(objects)}")
        hollow = [key for key, entry in listed.items() if not entry.nodes and not entry.children]
        if hollow:
            raise Broken(f"nothing holds {_names(hollow)}, which pins its parents")
        if self.index.state.pins:
            raise Broken("leases are left")

    def _check_promise(self, key: bytes, generation: int, level: Durability) -> None:
        entry = self.index.state.entries.get(key)
        if entry is None or entry.generation != generation:
            raise Broken(f"{_names([key])} was acknowledged, nobody evicted it, and it is not indexed")
        alive = {node.name: node.residency for node in self.nodes if node.residency is not None}
        holders = [name for name in entry.nodes if name in alive and key in alive[name]]
        in_object = OBJECT_TIER in entry.nodes and key in self.objects
        down = level is Durability.LOCAL and len(alive) < len(self.nodes)
        if not holders and not in_object and not down:
            raise Broken(f"{_names([key])} was acknowledged, and none of {entry.nodes} has it")
        if level is Durability.OBJECT and not in_object:
            raise Broken(f"{_names([key])} was acknowledged in the object tier, and is not there")

    # ---- clients

    def _begin(self, number: int) -> None:
        client = self.clients[number]
        client.running = True
        match client.script[client.at]:
            case Store(node) if self.nodes[node].residency is not None:
                self._ingest(self.nodes[node], number)
            case Evict(keep):
                self._evict(number, keep)
            case Read(node):
                self._look_up(number, node)
            case _:
                self._end(number)

    def _end(self, number: int) -> None:
        self.clients[number].at += 1
        self.clients[number].running = False

    def _ingest(self, node: _Node, number: int) -> None:
        store = self._operation(number)
        transfer = self._ticket()
        offsets = self._ask(node, transfer, ev.Reserved(transfer, _SHAPE, store.count))
        if isinstance(offsets, list):
            self._later("pulled", node, number, transfer, tuple(offsets))
        else:
            self._post(node, ev.ReservationEnded(transfer))
            self._end(number)

    def _pulled(self, node: _Node, number: int, transfer: int, offsets: tuple[int, ...]) -> None:
        store, ticket = self._operation(number), self._ticket()
        chunks = [_chunk(at, store.version) for at in range(store.count)]
        for chunk, offset in zip(chunks, offsets, strict=True):
            node.memory[offset] = _content(chunk)
        self._later("wait", node, number, transfer, ticket)
        offer = ev.StoreOffered(
            ticket=ticket,
            transfer=transfer,
            chunks=chunks,
            offsets=list(offsets),
            level=store.level,
            on_existing=OnExisting.SKIP,
        )
        self._post(node, offer)

    def _answered(self, node: _Node, ticket: int, value: Any) -> None:
        """A ticket is answered: who waited for it goes on."""
        for at, step in enumerate(self.steps):
            if step.what == "wait" and (step.node, step.arguments[2]) == (node.number, ticket):
                number, transfer, _ = step.arguments
                self.steps[at] = Step("acknowledge", step.node, step.incarnation, (number, transfer, ticket, value))
                return
            if step.what == "wait to reregister" and (step.node, step.arguments[0]) == (node.number, ticket):
                self.steps[at] = Step("reregistered", step.node, step.incarnation, (ticket,))
                return
            if step.what == "wait to read" and (step.node, step.arguments[1]) == (node.number, ticket):
                self.steps[at] = Step("read", step.node, step.incarnation, (step.arguments[0], ticket, value))
                return

    def _acknowledge(self, node: _Node, number: int, transfer: int, ticket: int, indexed: Any) -> None:
        residency, store = node.residency, self._operation(number)
        assert residency is not None
        if isinstance(indexed, frozenset):
            for key in residency.acknowledged(ticket) & indexed:
                found = residency.look(key)
                if found is None:
                    raise Broken(f"{_names([key])} is acknowledged, and cannot be read at that moment")
                _, generation = found
                if store.level is Durability.OBJECT and not residency.in_object(key):
                    continue
                # An entry that has ended since was evicted beside the store: whoever evicted it was asked to.
                entry = self.index.state.entries.get(key)
                if self.damaged or (entry is not None and entry.generation == generation):
                    self._promise(key, generation, store.level)
        self._post(node, ev.Unpinned(ticket))
        self._post(node, ev.ReservationEnded(transfer))
        self._end(number)

    def _promise(self, key: bytes, generation: int, level: Durability) -> None:
        before = self.promises.get(key)
        if before is None or before[0] != generation or _STRENGTH[before[1]] < _STRENGTH[level]:
            self.promises[key] = (generation, level)

    def _look_up(self, number: int, node: int) -> None:
        match = _now(self.index.match(ChunkKeys(b"".join(_KEYS))))
        if not match.count or self.nodes[node].residency is None:
            self._end(number)
            return
        lease = _LEASE + bytes([number])
        tip = _KEYS[match.count - 1]
        _now(self.index.pin(_KEYS[0], tip, lease, 1_000, 1_000, 0))
        self._later("deliver", self.nodes[node], number, match.count, tip)

    def _deliver(self, node: _Node, number: int, count: int, tip: bytes) -> None:
        ticket = self._ticket()
        self._later("wait to read", node, number, ticket)
        self._post(node, ev.Pinned(ticket, _KEYS[:count], True, True))

    def _read(self, node: _Node, number: int, ticket: int, value: Any) -> None:
        copies, missing = value
        for copy in copies:
            got = self._bytes(node, copy)
            if got != _content(copy.chunk):
                raise Broken(f"{_names([copy.chunk.key])} was delivered with the bytes of {got}")
        assert node.residency is not None
        denied = [record for record in _RECORDS if record.key in missing]
        self._post(node, ev.Denied(denied))
        self._post(node, ev.Unpinned(ticket))
        self._let_go(number)
        self._end(number)

    def _let_go(self, number: int) -> None:
        for key in _KEYS:
            _now(self.index.unpin(_KEYS[0], key, _LEASE + bytes([number])))

    def _bytes(self, node: _Node, copy: Copy) -> int | None:
        if copy.memory is not None:
            return node.memory.get(copy.memory.offset)
        assert copy.disk is not None
        return node.disk.get(copy.disk.offset)

    # ---- steps

    def _may(self, step: Step) -> bool:
        """Whether a step can be taken now."""
        if step.what.startswith("wait"):
            return False
        node = self.nodes[step.node]
        if step.what == "acknowledge" and isinstance(step.arguments[3], frozenset):
            store = self._operation(step.arguments[0])
            on_its_way = {*node.unsent, *node.sending}
            return store.level is not Durability.OBJECT or not on_its_way & set(_KEYS[: store.count])
        return True

    def _take(self, step: Step) -> None:
        node = self.nodes[step.node]
        there = node.residency is not None and node.incarnation == step.incarnation
        if step.incarnation and step.what not in _ELSEWHERE and not there:
            return  # the process that it belongs to has ended
        before = len(self.steps)
        _STEPS[step.what](self, *((node,) if step.incarnation else ()), *step.arguments)
        if step.incarnation and not there:  # nobody is left to hear the answer
            self.steps[before:] = [each for each in self.steps[before:] if not each.incarnation]

    def _lose(self, step: Step) -> None:
        """A message is lost: whoever waits for the answer hears of a failure."""
        node = self.nodes[step.node]
        if step.what == "drop":
            self._remember(*step.arguments)
        elif node.residency is not None and node.incarnation == step.incarnation:
            _ANSWERS[step.what](self, node, *step.arguments)

    def _register(self, node: _Node, ticket: int, records: tuple[ChunkRecord, ...]) -> None:
        generations = _now(self.index.register(node.name, records, 0))
        found = {record.key: each for record, each in zip(records, generations, strict=True) if each}
        self._later("registered", node, ticket, found)

    def _registered(self, node: _Node, ticket: int, generations: Mapping[bytes, int] | None) -> None:
        if generations is not None:
            self._post(node, ev.Indexed(ticket, generations))
        self._post(node, ev.IndexingEnded(ticket, _NO_ERROR if generations is None else None))

    def _withdraw(self, node: _Node, records: tuple[ChunkRecord, ...]) -> None:
        _now(self.index.unregister(node.name, records, 0))
        self._later("withdrawn", node, tuple(record.key for record in records))

    def _ask_to_evict(self, node: _Node, question: int, records: tuple[ChunkRecord, ...]) -> None:
        evicted = self._evict_now(records, node.name)
        out = {gone.record.key for gone in evicted.removed} | set(evicted.absent)
        self._later("answered", node, question, frozenset(out))

    def _ask_to_withdraw(self, node: _Node, question: int, records: tuple[ChunkRecord, ...]) -> None:
        marks = _now(self.index.unregister(node.name, records, 0, only_in_object=True))
        out = frozenset(record.key for record, mark in zip(records, marks, strict=True) if mark)
        self._later("answered", node, question, out)

    def _evict(self, number: int, keep: int) -> None:
        self._evict_now(tuple(reversed(_RECORDS[keep:])), "")
        self._end(number)

    def _evict_now(self, records: tuple[ChunkRecord, ...], asking: str) -> Any:
        evicted = _now(self.index.evict(records, 0, 1))
        for gone in evicted.removed:
            if self.promises.get(gone.record.key, (0,))[0] == gone.generation:
                del self.promises[gone.record.key]
        for name, generations in drops(evicted, asking).items():
            self.steps.append(Step("drop", 0, 0, (name, generations)))
        return evicted

    def _drop(self, name: str, generations: dict[bytes, int]) -> None:
        node = next(node for node in self.nodes if node.name == name)
        if node.residency is None:
            self._remember(name, generations)
        else:
            self._post(node, ev.Dropped(self._ticket(), generations))

    def _remember(self, name: str, generations: dict[bytes, int]) -> None:
        _now(self.index.remember_drops(name, generations))

    def _upload(self, node: _Node, key: bytes) -> None:
        residency = node.residency
        assert residency is not None
        node.unsent.pop(key, None)
        found = residency.look(key)
        if key not in node.sending and found is not None and residency.wants_object(key):
            node.sending.add(key)
            self._later("expect object", node, found[0].chunk)

    def _expect_object(self, node: _Node, chunk: Chunk) -> None:
        kept = _now(self.index.expect_objects([chunk.record], 1))[0]
        self._later("object expected", node, chunk, kept)

    def _object_expected(self, node: _Node, chunk: Chunk, kept: bool) -> None:
        """Look for what was written before; else read a chunk that is here, and put it."""
        assert node.residency is not None
        found = node.residency.look(chunk.key)
        if not kept:
            self._again(node, chunk.key)
        elif found is not None and found[0].in_object and chunk.key in self.objects:
            self._put_done(node, self.objects[chunk.key])
        else:
            self._read_and_put(node, chunk.key)

    def _read_and_put(self, node: _Node, key: bytes) -> None:
        ticket = self._ticket()
        copies, _ = self._ask(node, ticket, ev.Pinned(ticket, [key], False, False))
        if copies:
            if self._bytes(node, copies[0]) != _content(copies[0].chunk):
                raise Broken(f"{_names([key])} is uploaded with other bytes")
            self._later("put", node, copies[0].chunk)
        else:
            node.sending.discard(key)
        self._post(node, ev.Unpinned(ticket))

    def _put(self, node: _Node, chunk: Chunk) -> None:
        self.objects[chunk.key] = chunk
        self._later("put done", node, chunk)

    def _put_done(self, node: _Node, chunk: Chunk) -> None:
        assert node.residency is not None
        found = node.residency.look(chunk.key)
        if found is not None and found[1] and found[0].chunk.same_content(chunk):
            self._later("list object", node, chunk, found[1])
        else:
            self._again(node, chunk.key)

    def _again(self, node: _Node, key: bytes) -> None:
        assert node.residency is not None
        node.sending.discard(key)
        if node.residency.wants_object(key):
            node.unsent[key] = None
            self._later("upload", node, key)

    def _list_object(self, node: _Node, chunk: Chunk, generation: int) -> None:
        mark = _now(self.index.add_objects([chunk.record], [generation]))[0]
        self._later("object listed", node, chunk, generation, mark)

    def _object_listed(self, node: _Node, chunk: Chunk, generation: int, mark: ObjectMark) -> None:
        if mark is ObjectMark.LISTED:
            self._post(node, ev.Uploaded(chunk, generation))
        self._again(node, chunk.key)

    def _fetch(self, node: _Node, key: bytes) -> None:
        self._later("fetched", node, key, self.objects.get(key))

    def _fetched(self, node: _Node, key: bytes, chunk: Chunk | None) -> None:
        ticket = self._ticket()
        offsets = self._ask(node, ticket, ev.Reserved(ticket, _SHAPE, 1)) if chunk is not None else None
        if chunk is not None and isinstance(offsets, list):
            node.memory[offsets[0]] = _content(chunk)
            self._post(node, ev.Fetched(chunk, Durability.OBJECT, ticket, offsets[0]))
        else:
            self._post(node, ev.FetchFailed(key))
        self._post(node, ev.ReservationEnded(ticket))

    def _write(self, node: _Node, write: ev.Write) -> None:
        for placed, source in zip(write.placed, write.sources, strict=True):
            node.disk[placed.place.offset] = node.memory[source.offset]
        self._pool(node).commit(list(write.placed))
        self._sync(node)
        self._post(node, ev.Written(write.write))

    def _headers_written(self, node: _Node, write: ev.WriteHeaders) -> None:
        self._sync(node)
        self._post(node, ev.Written(write.write))

    def _forgotten(self, node: _Node, forget: ev.Forget) -> None:
        self._sync(node)
        self._post(node, ev.Forgotten(forget.removal))

    def _sync(self, node: _Node) -> None:
        """Headers are durable, with whatever else has changed on their pages: a crash keeps them."""
        node.image[:] = self._pool(node).image(0)

    # ---- the object tier is swept, an index is rebuilt, a node comes back

    def _sweep(self) -> None:
        claimed = _now(self.index.claim_objects(2, 3, 10))
        if claimed:
            self.steps.append(Step("delete objects", 0, 0, (tuple(claimed),)))

    def _delete_objects(self, claimed: tuple[ChunkRecord, ...]) -> None:
        for record in claimed:
            self.objects.pop(record.key, None)
        self.steps.append(Step("objects deleted", 0, 0, (claimed,)))

    def _objects_deleted(self, claimed: tuple[ChunkRecord, ...]) -> None:
        _now(self.index.objects_deleted(claimed, 3))

    def _empty(self) -> None:
        drawn = self.index.drawn
        self.index.state = IndexState(epoch="second")
        self.index.drawn = drawn + 1_000
        self.damaged = True
        self.promises = {key: (0, level) for key, (_, level) in self.promises.items() if level is Durability.OBJECT}
        for node in self.nodes:
            if node.residency is not None:
                self._reconcile(node)
        self.steps.append(Step("rebuild", 0, 0, ()))

    def _rebuild(self) -> None:
        found = [chunk.record for chunk in self.objects.values()]
        found.sort(key=lambda record: record.key)
        _now(self.index.register(OBJECT_TIER, found, 0, rebuilding=True))

    def _reconcile(self, node: _Node) -> None:
        self._later("take drops", node)

    def _take_drops(self, node: _Node) -> None:
        self._post(node, ev.Dropped(self._ticket(), _now(self.index.take_drops(node.name))))
        self._later("compare", node)

    def _compare(self, node: _Node) -> None:
        page, _ = _now(self.index.holdings(node.name, 0))
        self._later("compared", node, tuple(page))

    def _compared(self, node: _Node, page: tuple[tuple[ChunkRecord, int], ...]) -> None:
        residency = node.residency
        assert residency is not None
        gone, listed = [], set()
        for record, generation in page:
            found = residency.look(record.key)
            if found is None:
                gone.append(record)
            elif found[1] == generation:
                listed.add(record.key)
        self._post(node, ev.Denied(gone))
        missing = sorted(set(residency.keys()) - listed)
        ticket = self._ticket()
        self._later("wait to reregister", node, ticket)
        self._post(node, ev.RegistrationWanted(ticket, missing))

    def _reregistered(self, node: _Node, ticket: int) -> None:
        self._post(node, ev.Unpinned(ticket))

    def _boot(self, node: _Node) -> None:
        node.incarnation += 1
        node.memory, node.unsent, node.sending = {}, {}, set()
        pool = None
        if self.scenario.drives:
            geometry = Geometry(_SLAB, 2, 2)
            if node.image is None:
                node.image = np.zeros(geometry.header_pages * PAGE_BYTES, dtype=np.uint8)
            pool = PoolMap([geometry], [node.image.copy()], 4096)
            pool.recover(0, geometry.header_pages)
        arena = SlotAllocator(self.scenario.slabs * _SLAB, _SLAB)
        node.residency = Residency(ResidencySettings(), arena, pool, objects=True)

    def _crash(self, node: _Node) -> None:
        node.residency = None
        weak = {Durability.MEMORY} if self.scenario.drives else {Durability.MEMORY, Durability.LOCAL}
        self.promises = {key: each for key, each in self.promises.items() if each[1] not in weak}
        for step in [each for each in self.steps if each.node == node.number and each.incarnation == node.incarnation]:
            if step.what in _OF_CLIENTS:
                self.steps.remove(step)
                self._let_go(step.arguments[0])
                self._end(step.arguments[0])
            elif step.what not in _ELSEWHERE:
                self.steps.remove(step)

    # ---- a node's machine

    def _post(self, node: _Node, event: ev.Event) -> None:
        assert node.residency is not None
        for instruction in node.residency.handle(event, 0.0):
            self._carry_out(node, instruction)

    def _ask(self, node: _Node, ticket: int, event: ev.Event) -> Any:
        """The answer of a ticket that is answered at once; None if it is not."""
        assert node.residency is not None
        answer = None
        for instruction in node.residency.handle(event, 0.0):
            if isinstance(instruction, ev.Complete) and instruction.ticket == ticket:
                answer = instruction.value
            else:
                self._carry_out(node, instruction)
        return answer

    def _carry_out(self, node: _Node, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Complete(ticket, value):
                self._answered(node, ticket, frozenset(value) if isinstance(value, set) else value)
            case ev.Fail(ticket, _):
                self._answered(node, ticket, None)
            case ev.Write():
                self._later("write", node, instruction)
            case ev.WriteHeaders():
                self._pool(node).commit(list(instruction.placed))
                self._later("headers written", node, instruction)
            case ev.Forget():
                self._pool(node).forget(list(instruction.placed))
                self._later("forgotten", node, instruction)
            case ev.Register(ticket, records):
                self._later("register", node, ticket, tuple(records))
            case ev.Withdraw(records):
                self._later("withdraw", node, tuple(records))
            case ev.AskToEvict(question, records):
                self._later("ask to evict", node, question, tuple(records))
            case ev.AskToWithdraw(question, records):
                self._later("ask to withdraw", node, question, tuple(records))
            case ev.Fetch(keys):
                for key in keys:
                    self._later("fetch", node, key)
            case ev.Upload(key, _, _):
                if key not in node.unsent and key not in node.sending:
                    node.unsent[key] = None
                    self._later("upload", node, key)
            case ev.CancelUpload(key):
                if key in node.unsent:
                    del node.unsent[key]
                    self.steps = [each for each in self.steps if not _is_upload(each, node, key)]

    def _pool(self, node: _Node) -> PoolMap:
        assert node.residency is not None and node.residency.pool is not None
        return node.residency.pool

    def _later(self, what: str, node: _Node | None, *arguments: Any) -> None:
        number, incarnation = (node.number, node.incarnation) if node is not None else (0, 0)
        self.steps.append(Step(what, number, incarnation, arguments))

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def _operation(self, number: int) -> Any:
        return self.clients[number].script[self.clients[number].at]


def _is_upload(step: Step, node: _Node, key: bytes) -> bool:
    mine = (step.what, step.node, step.incarnation) == ("upload", node.number, node.incarnation)
    return mine and step.arguments == (key,)


_STRENGTH: Final = {level: rank for rank, level in enumerate(Durability)}
_STEPS: Final[dict[str, Callable[..., None]]] = {
    "pulled": Cluster._pulled,
    "acknowledge": Cluster._acknowledge,
    "deliver": Cluster._deliver,
    "read": Cluster._read,
    "register": Cluster._register,
    "registered": Cluster._registered,
    "withdraw": Cluster._withdraw,
    "withdrawn": lambda self, node, keys: self._post(node, ev.Withdrawn(keys)),
    "ask to evict": Cluster._ask_to_evict,
    "ask to withdraw": Cluster._ask_to_withdraw,
    "answered": lambda self, node, question, out: self._post(node, ev.Answered(question, out)),
    "drop": Cluster._drop,
    "upload": Cluster._upload,
    "expect object": Cluster._expect_object,
    "object expected": Cluster._object_expected,
    "put": Cluster._put,
    "put done": Cluster._put_done,
    "list object": Cluster._list_object,
    "object listed": Cluster._object_listed,
    "fetch": Cluster._fetch,
    "fetched": Cluster._fetched,
    "write": Cluster._write,
    "headers written": Cluster._headers_written,
    "forgotten": Cluster._forgotten,
    "delete objects": Cluster._delete_objects,
    "objects deleted": Cluster._objects_deleted,
    "rebuild": Cluster._rebuild,
    "take drops": Cluster._take_drops,
    "compare": Cluster._compare,
    "compared": Cluster._compared,
    "reregistered": Cluster._reregistered,
}
# Requests that reach the index or the object tier although the process that sent them has ended.
_ELSEWHERE: Final = frozenset(
    {"register", "withdraw", "ask to evict", "ask to withdraw", "expect object", "put", "list object"}
)
_WRITING: Final = frozenset({"object expected", "put", "put done", "list object"})
_OF_CLIENTS: Final = frozenset({"pulled", "wait", "acknowledge", "deliver", "wait to read", "read"})
# What the one who waits hears when the request, or its answer, is lost.
_ANSWERS: Final[dict[str, Callable[..., None]]] = {
    "drop": Cluster._remember,
    "register": lambda self, node, ticket, records: self._registered(node, ticket, None),
    "registered": lambda self, node, ticket, generations: self._registered(node, ticket, None),
    "withdraw": lambda self, node, records: self._post(node, ev.Withdrawn([record.key for record in records])),
    "ask to evict": lambda self, node, question, records: self._post(node, ev.Answered(question, frozenset())),
    "ask to withdraw": lambda self, node, question, records: self._post(node, ev.Answered(question, frozenset())),
    "answered": lambda self, node, question, out: self._post(node, ev.Answered(question, frozenset())),
    "expect object": lambda self, node, chunk: self._again(node, chunk.key),
    "object expected": lambda self, node, chunk, kept: self._again(node, chunk.key),
    "put": lambda self, node, chunk: self._again(node, chunk.key),
    "put done": lambda self, node, chunk: self._again(node, chunk.key),
    "list object": lambda self, node, chunk, generation: self._again(node, chunk.key),
    "object listed": lambda self, node, chunk, generation, mark: self._again(node, chunk.key),
    "fetch": lambda self, node, key: self._fetched(node, key, None),
    "fetched": lambda self, node, key, chunk: self._fetched(node, key, None),
}


def _names(keys: Any) -> str:
    return ", ".join(sorted(key[:1].decode() for key in keys)) or "nothing"


def _told(step: Step) -> str:
    where = f"storage-{step.node}: " if step.incarnation else ""
    return f"{where}{step.what} {' '.join(_short(each) for each in step.arguments)}".strip()


def _short(value: Any) -> str:
    if isinstance(value, bytes):
        return value[:1].decode() if len(value) == 32 else repr(value)
    if isinstance(value, Chunk):
        return f"{value.key[:1].decode()}/{_content(value)}"
    if isinstance(value, ChunkRecord):
        return value.key[:1].decode()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_short(key)}: {_short(each)}" for key, each in value.items()) + "}"
    if isinstance(value, tuple | list | frozenset | set):
        return "(" + " ".join(_short(each) for each in value) + ")"
    if isinstance(value, int) and value >= _NAMED:
        return f"#{value % 10_000}"
    return str(value) if isinstance(value, int | str | None | Enum) else type(value).__name__


# ---- states as values


class _Canon:
    """A state without what does not matter: numbers of tickets and generations, counters for the dashboard."""

    _LEFT_OUT = frozenset({"_numbers", "hits", "evictions", "_tickets", "drawn", "scenario"})

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._seen: dict[int, int] = {}

    def of(self, value: Any) -> Any:
        kind = type(value)
        if kind is int:
            return value if value < _NAMED else ("#", self._numbers.setdefault(value, len(self._numbers)))
        if value is None or kind in (bytes, str, bool, float):
            return value
        if isinstance(value, dict):
            return tuple((self.of(key), self.of(each)) for key, each in value.items())
        if kind in (list, tuple, deque):
            return tuple(self.of(each) for each in value)
        if kind in (set, frozenset):
            return tuple(sorted((self.of(each) for each in value), key=repr))
        if isinstance(value, Enum):
            return value.name
        if kind is Chunk:
            return value.key, int(value.checksums[0])
        if kind is np.ndarray:
            return value.tobytes()
        if kind is bytearray:
            return bytes(value)
        if kind is MethodType:
            return value.__func__.__name__
        if isinstance(value, BaseException):
            return kind.__name__
        return self._object(value, kind)

    def _object(self, value: Any, kind: type) -> Any:
        seen = self._seen.get(id(value))
        if seen is not None:
            return ("@", seen)
        self._seen[id(value)] = len(self._seen)
        names = _ATTRIBUTES.get(kind)
        if names is None:
            found = [each.name for each in fields(value)] if is_dataclass(value) else list(vars(value))
            names = _ATTRIBUTES[kind] = [name for name in found if name not in self._LEFT_OUT]
        return (kind.__name__, *[self.of(getattr(value, name)) for name in names])


_ATTRIBUTES: dict[type, list[str]] = {}


def fingerprint(cluster: Cluster) -> int:
    """Equal for states that differ in names only."""
    canon = _Canon()
    index = cluster.index.state
    parts = [canon.of({key: index.entries[key] for key in sorted(index.entries)})]
    parts.append(canon.of([cluster.nodes, index.pins, sorted(index.objects.items()), index.dropped]))
    rest = [sorted(cluster.objects.items(), key=lambda item: item[0]), sorted(cluster.promises.items())]
    counts = [cluster.crashes, cluster.losses, cluster.sweeps, cluster.emptied, cluster.damaged]
    parts.append(canon.of([*rest, counts, [(each.at, each.running) for each in cluster.clients]]))
    steps = sorted((canon.of(step) for step in _in_order(cluster.steps)), key=repr)
    return hash((*parts, *steps))


def _in_order(steps: list[Step]) -> list[Step]:
    """Which of them are named first must not depend on when they began."""
    return sorted(steps, key=lambda step: (step.what, step.node, step.incarnation, _short(step.arguments[:1])))


copyreg.pickle(np.ndarray, lambda array: (_array, (array.tobytes(), array.dtype.str)))


def _array(raw: bytes, kind: str) -> Any:
    return np.frombuffer(bytearray(raw), dtype=kind)


@dataclass(frozen=True, slots=True)
class Explored:
    """What an exploration saw. `story`: how a promise was broken, empty if none was. `complete`: nothing is left."""

    states: int
    ends: int
    complete: bool
    story: tuple[str, ...]
    wall_s: float


def explore(scenario: Scenario, states_max: int = 1 << 60) -> Explored:
    """Follow every choice from every state, breadth first."""
    started = time.perf_counter()
    first = Cluster(scenario)
    parents: dict[int, tuple[int, tuple[str, ...]]] = {fingerprint(first): (0, ())}
    frontier: deque[tuple[int, bytes]] = deque([(fingerprint(first), _frozen(first))])
    ends = 0
    while frontier and len(parents) < states_max:
        mark, frozen = frontier.popleft()
        choices = list(pickle.loads(frozen).choices())
        for choice in choices:
            state: Cluster = pickle.loads(frozen)
            try:
                state.take(choice)
                after = fingerprint(state)
                if after in parents:
                    continue
                parents[after] = (mark, choice)
                if state.is_over:
                    ends += 1
                    pickle.loads(_frozen(state)).finish()
            except (Broken, AssertionError, QuireError, KeyError) as error:
                story = (*_story(scenario, parents, mark, choice), f"{type(error).__name__}: {error}")
                return Explored(len(parents), ends, False, story, time.perf_counter() - started)
            frontier.append((after, _frozen(state)))
    return Explored(len(parents), ends, not frontier, (), time.perf_counter() - started)


def _frozen(state: Cluster) -> bytes:
    return pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL)


def _story(
    scenario: Scenario, parents: dict[int, tuple[int, tuple[str, ...]]], mark: int, last: tuple[str, ...]
) -> tuple[str, ...]:
    """The choices that led there, told again."""
    choices = [last]
    while parents[mark][1]:
        mark, choice = parents[mark]
        choices.append(choice)
    state, told = Cluster(scenario), []
    for choice in reversed(choices):
        before = pickle.loads(_frozen(state))
        try:
            told.append(state.take(choice))
        except Exception:
            told.append(f"then: {_last(before, choice)}")
    return tuple(told)


def _last(state: Cluster, choice: tuple[str, ...]) -> str:
    return _told(state.steps[int(choice[1])]) if choice[0] in ("step", "lose") else " ".join(choice)


_OBJECT, _MEMORY, _LOCAL = Durability.OBJECT, Durability.MEMORY, Durability.LOCAL
SCENARIOS: Final = (
    Scenario(
        "stored again beside an eviction",
        clients=((Evict(),), (Store(0, 1, _MEMORY),)),
        before=(Store(0, 1, _MEMORY), Store(1, 1, _MEMORY)),
    ),
    Scenario(
        "an object beside an eviction",
        clients=((Evict(),), (Store(0, 1, _OBJECT),)),
        before=(Store(0, 1, _OBJECT),),
        sweeps=1,
    ),
    Scenario(
        "messages lost beside an eviction",
        clients=((Evict(),), (Store(0, 1, _OBJECT),)),
        before=(Store(0, 1, _OBJECT),),
        losses=1,
        sweeps=1,
    ),
    Scenario(
        "drives, and an index that is emptied",
        clients=((Store(0, 1, _OBJECT),), (Evict(),)),
        before=(Store(1, 1, _LOCAL),),
        drives=True,
        emptied=1,
    ),
    Scenario("two stores of one chunk", clients=((Store(0, 1, _MEMORY),), (Store(0, 1, _MEMORY, 1),)), losses=1),
    Scenario("a prefix on two nodes", clients=((Store(0, 2, _MEMORY),), (Store(1, 2, _MEMORY), Evict(1)))),
    Scenario("a node crashes", clients=((Store(0, 2, _OBJECT),), (Read(1),)), crashes=1),
    Scenario("on drives", clients=((Store(0, 1, _LOCAL),), (Evict(),)), drives=True, crashes=1),
    Scenario(
        "the index is emptied",
        clients=((Read(1),), (Evict(1),)),
        before=(Store(0, 2, _OBJECT),),
        emptied=1,
        sweeps=1,
    ),
    Scenario(
        "no memory",
        clients=((Store(0, 2, _OBJECT),), (Read(0), Read(1))),
        slabs=1,
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Every order of events of a tiny cluster, breadth first.")
    parser.add_argument("--states", type=int, default=1 << 60, help="of a scenario, at most")
    parser.add_argument("--only", default="", help="the scenarios whose names contain this")
    parser.add_argument("--mutation", default="", help="put a known fault back: " + ", ".join(MUTATIONS))
    arguments = parser.parse_args()
    if arguments.mutation:
        MUTATIONS[arguments.mutation].apply()
    for scenario in SCENARIOS:
        if arguments.only not in scenario.name:
            continue
        found = explore(scenario, arguments.states)
        extent = "the first " if found.story or not found.complete else "all "
        print(f"{scenario.name}: {extent}{found.states} states, {found.ends} ends, {found.wall_s:.1f} s", flush=True)
        for line in found.story:
            print("   ", line)
        if found.story:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
