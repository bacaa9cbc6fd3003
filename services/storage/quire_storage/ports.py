"""Ports of a storage node to the outside, except for the data plane (`quire.transport`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from quire.model.chunk_object import ObjectRange
from quire.model.descriptor import Descriptor, RdmaTarget
from quire.model.durability import Durability
from quire.model.index import Drop, Held, Listing, ObjectMark
from quire.model.iocb import Iocb
from quire.model.keys import ChunkKeys
from quire.model.nodes import Node
from quire.model.outcome import NodeOutcome
from quire.model.policy import PolicyList, TenantPolicy
from quire.model.records import ChunkRecord
from quire_server.clock import Clock

__all__ = [
    "COPY_S_MAX",
    "AdmissionRequest",
    "BlockIO",
    "Clock",
    "ClusterIndex",
    "Drives",
    "Listing",
    "ObjectName",
    "ObjectTier",
    "Peers",
    "Ports",
    "RateGrant",
    "RateSource",
    "Spawn",
]

Bytes = npt.NDArray[np.uint8]
COPY_S_MAX: Final = 60.0
"""For how long a node permits another one to write copies into its memory."""


class ClusterIndex(Protocol):
    """The orchestrator, as the place where replicas are registered.

    Every index entry has a generation, drawn anew when it comes into being: a decision on one entry does not concern
    the next one of the same key.
    """

    async def commit(
        self, node_id: str, records: Sequence[ChunkRecord], *, reporter: str, fresh: int = 0, wait_ms: int = 0
    ) -> list[int]:
        """Register; the generation of each entry, 0 for a chunk whose parent is not indexed (yet).

        `reporter`: this node, here and below; the index counts the reports of each. `fresh`: the generation of
        entries that are new, random and never used before; 0 has one drawn. `wait_ms`: for how long the answer may wait
        for parents where none of these can be registered; it may come earlier.
        """

    async def join(
        self, node_id: str, records: Sequence[ChunkRecord], generations: Sequence[int], *, only_in_object: bool
    ) -> list[bool]:
        """List the node in these very entries; False for one that has ended.

        `only_in_object`: also for one that does not list the object tier. Counts as a change that the node reported.
        """

    async def add_objects(
        self, records: Sequence[ChunkRecord], generations: Sequence[int], *, reporter: str
    ) -> list[ObjectMark]:
        """List the object tier in these very entries."""

    async def expect_objects(self, records: Sequence[ChunkRecord]) -> list[bool]:
        """Announce objects that are about to be written; False for a key whose objects are being deleted.

        They are deleted some time after their keys' entries have ended.
        """

    async def object_generations(self, records: Sequence[ChunkRecord]) -> tuple[list[int], bool]:
        """Return the generations of the entries that list the object tier, 0 where none does.

        The second value is False while the index is being rebuilt from the object tier.
        """

    async def withdraw(
        self, node_id: str, records: Sequence[ChunkRecord], *, reporter: str, hidden: bool = False
    ) -> None:
        """Deregister chunks that are lost or corrupt."""

    async def withdraw_in_object(self, node_id: str, records: Sequence[ChunkRecord]) -> list[bool]:
        """Deregister the node where the object tier is listed too; False where it is not."""

    async def withdraw_surplus(
        self, node_id: str, records: Sequence[ChunkRecord], keepers: Sequence[str]
    ) -> list[bool]:
        """Deregister the node where each of `keepers` lives and is listed, and no lease pins the chunk; else False."""

    async def evict(self, node_id: str, records: Sequence[ChunkRecord]) -> list[bool]:
        """Take chunks out whose last copy goes, children first; False for one that others extend or a lease pins."""

    async def locate(self, records: Sequence[ChunkRecord]) -> list[tuple[str, ...]]:
        """The live nodes that hold each chunk, and `OBJECT_TIER` where it does."""

    async def generations(self, node_id: str, records: Sequence[ChunkRecord]) -> list[int]:
        """Generation of each entry that lists the node; 0 where none does."""

    async def drops(self, node_id: str, cursor: int) -> tuple[list[Drop], int]:
        """A page of what the node is to drop and has not settled, and the next cursor, 0 at the end."""

    async def settle_drops(self, node_id: str, drops: Sequence[Drop]) -> None:
        """These are carried out."""

    async def listing(self, node_id: str) -> Listing:
        """Return the listing of a node, in two numbers."""

    async def holdings(self, node_id: str, cursor: int) -> tuple[list[Held], int]:
        """Return a page of a node's listing, and the next cursor, 0 at the end.

        A chunk that is listed all the while is in one page at least.
        """

    async def withdraw_held(self, node_id: str, holdings: Sequence[Held]) -> None:
        """Deregister entries of `holdings` that the node does not have. Counts as a change that it reported."""

    async def damaged(self, node_id: str) -> None:
        """A node found that the index has lost entries: the object tier must be looked at too."""

    async def rebuilt(self, token: str) -> None:
        """Note that everything in the object tier was reported to the index."""

    async def policies(self) -> PolicyList:
        """Return the policies of namespaces and tenants, and how many storage nodes share the quotas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRequest:
    """A layerwise delivery that wants a rate.

    `compute_window_us`: time that a layer may take so that none comes late; 0 for unknown.
    """

    delivery: str
    bytes_per_layer: int
    compute_window_us: int
    layers: int
    tenant: TenantPolicy
    priority: int = 0


@dataclass(frozen=True, slots=True)
class RateGrant:
    """A rate in bytes per second, for `left_s`; 0: wait, and renew.

    `credit_bytes_per_s`: shared rate of this node's deliveries without a rate. `short`: it is less than the delivery's
    part of the link; rates that others free raise it.
    """

    delivery: str
    rate_bytes_per_s: int
    left_s: float
    credit_bytes_per_s: int = 0
    short: bool = False


class RateSource(Protocol):
    """The scheduler."""

    async def admit(self, request: AdmissionRequest, layers_left: int, held_bytes_per_s: int) -> RateGrant: ...
    async def renew(self, layers_left: dict[str, int]) -> list[RateGrant]:
        """Grants of those that the scheduler knows."""

    async def finish(self, delivery: str) -> None: ...
    async def observe(self, request: AdmissionRequest, rate_bytes_per_s: int, stall_s: float) -> None: ...


class Peers(Protocol):
    """Other storage nodes."""

    async def storage_nodes(self) -> list[Node]:
        """The live ones, this one among them."""

    async def described(self) -> list[Node]:
        """Return the live ones with their stats, from the orchestrator; for rare calls."""

    async def describe(self, node: Node, keys: ChunkKeys) -> list[bytes]:
        """Headers, as the pool's format has them, of those chunks that the node has."""

    async def deliver(self, node: Node, descriptor: Descriptor) -> NodeOutcome:
        """Have another node deliver chunks that it has into memory of this one."""

    async def replicate(
        self,
        node: Node,
        generations: Mapping[bytes, int],
        source: Node,
        *,
        level: Durability = Durability.REPLICATED,
        hot: bool = False,
    ) -> list[int]:
        """Have a node pull chunks; for each 0: it has none, 1: it had a copy, 2: it has one now.

        `hot`: while they are read much, and in memory will do. Raises `NodeUnavailable` for a node that is to be
        removed.
        """


class BlockIO(Protocol):
    """Batched I/O on open files, in the shape of Tutti's gio_uring (§3.2). Never blocks the caller.

    `init_queue` → for each batch `get_iocb`, `fill`, `issue_io` → `wait_cqe` when `event_fd` is readable. Within an
    IOCB contexts complete in any order; between IOCBs nothing is promised either.
    """

    event_fd: int

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str:
        """Description of the implementation, for people."""

    def init_queue(self, files: Sequence[int], memories: Sequence[Bytes]) -> None:
        """Contexts name `files` by index. Raises `BlockIOUnavailable`."""

    def get_iocb(self) -> Iocb:
        """An empty one, to be filled."""

    def issue_io(self, iocb: Iocb) -> None:
        """Start all its contexts; their memory must stay until it is complete."""

    def wait_cqe(self) -> list[Iocb]:
        """Return the batches that have completed since the last call, with their results."""

    def close(self) -> None:
        """Nothing may be in flight."""


class Nonces(Protocol):
    """Sends nonces to addresses of strangers, which cost this process nothing."""

    async def send(self, target: RdmaTarget, nonce: bytes, tenant: str) -> None:
        """Send 16 bytes as a message; of 32, the first half is written into the target. Raises `QuireError`."""


class Spawn(Protocol):
    """Runs something in the background of the node. `traced`: part of the current request; else it may outlive it."""

    def __call__(self, work: Coroutine[Any, Any, Any], *, traced: bool = False) -> asyncio.Task[Any]: ...


class Drives(Protocol):
    """Files on the drives, apart from reads and writes in batches. Blocks; used at start only."""

    direct: bool

    def open(self, name: str) -> int | None:
        """Descriptor of the pool's file on that drive; None if there is none. Raises `DriveUnusable`."""

    def create(self, name: str, size: int, head: bytes) -> int:
        """A preallocated file, zero after `head`, that exists whole or not at all. Raises `DriveUnusable`."""

    def grow(self, file: int, size: int, page: bytes, at: int) -> None:
        """Preallocate a file up to `size`, zero at its new end; then write a page.

        If it fails before that, the file is unchanged, but longer. Raises `DriveUnusable`.
        """

    def head(self, file: int, length: int) -> bytes: ...
    def size(self, file: int) -> int: ...
    def close(self) -> None: ...


ObjectName = tuple[bytes, int]
"""Of a chunk's object: its key, and the generation of the index entry under which it was written. Generation 0 stands
for an object that an earlier release wrote."""


class ObjectTier(Protocol):
    """Chunk objects. Errors are `Unavailable`."""

    @property
    def description(self) -> str: ...
    async def put(self, name: ObjectName, data: bytes) -> None: ...
    async def get(self, name: ObjectName) -> bytes | None:
        """Read an object; None if there is none."""

    async def read(self, name: ObjectName, start: int, stop: int, *, described: bool = True) -> ObjectRange | None:
        """Read bytes [start, stop) of an object, fewer if it ends before, in one request; None if there is none.

        `described`: with its size and its header, where the store has that; it costs some more.
        """

    async def delete(self, names: Sequence[ObjectName]) -> None:
        """Delete objects; it is no error if one does not exist."""

    async def generations(self, key: bytes) -> list[int]:
        """Generations of a chunk's objects, the newest object first. Not 0, which is in `list` only."""

    def list(self) -> AsyncIterator[list[ObjectName]]:
        """Names of all chunk objects, some at a time."""

    async def header(self, name: ObjectName) -> bytes | None:
        """The header of a chunk object, without its bytes; None if there is no sound one."""


class BlockIOChoice(Protocol):
    """Makes the `BlockIO` of that name, with that many contexts at a time."""

    def __call__(self, name: str, depth: int, *, direct: bool) -> BlockIO: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Everything outside of a node, but for the data plane. `objects` is None for no object tier.

    `threads`: makes an executor of that many for checksums and copies. `draw`: makes random bytes.
    """

    index: ClusterIndex
    rates: RateSource
    peers: Peers
    objects: ObjectTier | None
    drives: Callable[[], Drives]
    block_io: BlockIOChoice
    clock: Clock
    threads: Callable[[int], Executor] = lambda count: ThreadPoolExecutor(count, "storage")
    draw: Callable[[int], bytes] = os.urandom
