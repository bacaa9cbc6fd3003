"""What a tiny cluster consists of: two chunks, clients' operations, nodes, and steps of what is under way."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import numpy as np

from quire.model.durability import Durability
from quire.model.errors import QuireError
from quire.model.records import ChunkRecord
from quire.testing.index import IndexState, MemoryIndex
from quire_storage.core.chunks import Chunk
from quire_storage.core.pool.slots import Shape
from quire_storage.core.residency import Residency

SHAPE: Final = Shape(1, 4096)
SLAB: Final = 2 * 4096
GENERATIONS: Final = 1 << 60
NAMED: Final = 1 << 39
"""Numbers from here on are names of tickets or generations: which ones they are is of no importance."""
KEYS: Final = (b"A" * 32, b"B" * 32)
RECORDS: Final = (
    ChunkRecord(KEYS[0], b"", KEYS[0], b""),
    ChunkRecord(KEYS[1], KEYS[0], KEYS[0], KEYS[0]),
)
LEASE: Final = b"lease"
LOST: Final = QuireError("the message was lost")


def chunk_of(number: int, version: int) -> Chunk:
    sums = np.array([number * 10 + version], dtype=np.uint32)
    return Chunk(RECORDS[number], 1, 4096, sums)


def content_of(chunk: Chunk) -> int:
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
class Follow:
    """What of the prefix can be read or arrives at `node`."""

    node: int = 0


Operation = Store | Evict | Read | Follow


@dataclass(frozen=True, slots=True)
class Scenario:
    """`before`: done in order, to its end, before the clients begin. The numbers say how often what may happen.

    `emptied`: the index loses everything; `sweeps`: the objects' time of grace is over.
    """

    name: str
    clients: tuple[tuple[Operation, ...], ...]
    before: tuple[Operation, ...] = ()
    drives: bool = False
    slabs: int = 2
    crashes: int = 0
    losses: int = 0
    sweeps: int = 0
    emptied: int = 0


class TinyIndex(MemoryIndex):
    """Draws generations one after the other: their order is forgotten when states are compared."""

    def __init__(self) -> None:
        self.state = IndexState(epoch="first")
        self.drawn = GENERATIONS

    def draw(self) -> int:
        self.drawn += 1
        return self.drawn

    _draw = draw


class Broken(Exception):
    """A promise was broken."""


def now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the index in memory waits for nothing")


@dataclass(slots=True)
class Node:
    """A node's process and its drive. `unsent`, `sending`: keys on their way to the object tier.

    `arriving`: the stores that run, by transfer: their slots, which version of the chunks, and whether it is there.
    """

    number: int
    residency: Residency | None = None
    incarnation: int = 0
    memory: dict[int, int] = field(default_factory=dict)
    disk: dict[int, int] = field(default_factory=dict)
    image: Any = None
    unsent: dict[bytes, None] = field(default_factory=dict)
    sending: set[bytes] = field(default_factory=set)
    arriving: dict[int, tuple[tuple[int, ...], int, bool]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"storage-{self.number}"


@dataclass(slots=True)
class Client:
    """`at`: which of its operations is next. `running`: it waits for an answer."""

    script: tuple[Operation, ...]
    at: int = 0
    running: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """Something under way takes its next step: `what`, at a node's `incarnation` (0: at no node's)."""

    what: str
    node: int
    incarnation: int
    arguments: tuple[Any, ...]


def names_of(keys: Any) -> str:
    return ", ".join(sorted(key[:1].decode() for key in keys)) or "nothing"


def told(step: Step) -> str:
    where = f"storage-{step.node}: " if step.incarnation else ""
    return f"{where}{step.what} {' '.join(short(each) for each in step.arguments)}".strip()


def short(value: Any) -> str:
    if isinstance(value, bytes):
        return value[:1].decode() if len(value) == 32 else repr(value)
    if isinstance(value, Chunk):
        return f"{value.key[:1].decode()}/{content_of(value)}"
    if isinstance(value, ChunkRecord):
        return value.key[:1].decode()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{short(key)}: {short(each)}" for key, each in value.items()) + "}"
    if isinstance(value, tuple | list | frozenset | set):
        return "(" + " ".join(short(each) for each in value) + ")"
    if isinstance(value, int) and value >= NAMED:
        return f"#{value % 10_000}"
    return str(value) if isinstance(value, int | str | None | Enum) else type(value).__name__
