"""Copies between storage nodes: by the same deliveries that clients get, from node to node.

A node pulls: it asks another for the headers of some chunks, has them delivered into memory of its own, verifies each
against its header, and keeps it. A chunk stored as `replicated` is acknowledged when a second node has pulled it. When
a node is lost, those who hold replicated chunks that have one live holder left have another node pull them. When it
comes back there are three copies: one is given up.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from quire.client.memory import quiescence
from quire.client.memory.quarantine import may_be_in_use
from quire.model.chunk_object import sound_header
from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.durability import Durability
from quire.model.errors import QuireError
from quire.model.index import OBJECT_TIER
from quire.model.keys import ChunkKeys
from quire.model.nodes import Node
from quire.telemetry import counter, logger, names
from quire.transport import Region, Transport
from quire.transport.pages import anonymous_memory
from quire_storage.cluster import redundancy
from quire_storage.cluster.registry import Registry
from quire_storage.config import StorageConfig
from quire_storage.core.checksums import row_checksums
from quire_storage.core.chunks import Chunk
from quire_storage.core.pool.format import unpack_header
from quire_storage.ports import COPY_S_MAX, Clock, ClusterIndex, Peers
from quire_storage.tiers.tiers import Tiers

Bytes = npt.NDArray[np.uint8]
COPIES = 2
LACKED, KEPT, COPIED = range(3)
_LANDING_BYTES = 32 << 20
_BATCH_CHUNKS = 64
_PATROL_CHUNKS = 512
_SLICE_CHUNKS = 8192
_Start = tuple[str, str]
"""Of a node: its name, and what changes when it starts anew or loses a drive."""
_RESPREAD_PAUSE_S = 5.0
_LANDINGS_MAX = 4
_QUARANTINED_MAX = 16


class Replicator:
    """`me` describes this node to others."""

    def __init__(
        self,
        *,
        config: StorageConfig,
        tiers: Tiers,
        transport: Transport,
        index: ClusterIndex,
        registry: Registry,
        peers: Peers,
        clock: Clock,
        me: Callable[[], Node],
    ) -> None:
        self._config = config
        self._tiers = tiers
        self._transport = transport
        self._index = index
        self._registry = registry
        self._peers = peers
        self._clock = clock
        self._me = me
        # One batch of each source at a time, so that a frozen one holds up no other, and some of all.
        self._landing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._landing_turns = asyncio.Semaphore(_LANDINGS_MAX)
        self._round: deque[bytes] = deque()
        self._spreading: Counter[bytes] = Counter()
        # Of replicated chunks a start of another node that had a copy when that was looked at last.
        self._elsewhere: dict[bytes, _Start] = {}
        # Registered memory that a silent node may still write to. It is never unmapped and never used again.
        self._quarantined: deque[tuple[float, Region, Bytes]] = deque()
        self._known: set[_Start] | None = None
        self._pending = 0
        self._alone = set[bytes]()
        self._copied = counter(names.REPLICATED_BYTES, "By", "copied from other nodes")

    @property
    def alone(self) -> int:
        """Replicated chunks without a second live copy, or not looked at since a node came or went."""
        return self._pending + len(self._alone)

    @property
    def checked_among(self) -> str:
        """Digest of the storage nodes that were alive when all replicas were last found; not while some are missing."""
        if self._known is None or self.alone:
            return redundancy.NOT_YET
        return redundancy.digest(self._known)

    async def pull(
        self, source: Node, generations: Mapping[bytes, int], level: Durability = Durability.REPLICATED
    ) -> list[int]:
        """Keep copies of chunks of another node, indexed, and on a drive unless the level is `MEMORY`.

        `generations`: of the entries that list the source, by key. Copies are listed in these very entries, or not at
        all: one may have been evicted since, and a copy that came late would bring it back. 0 from a node that does not
        say: its copies are registered like stores.

        Returns a mark for each: `LACKED`, `KEPT` if it was here before, or `COPIED`.
        """
        within = {key: generation for key, generation in generations.items() if generation}
        absent = [key for key in generations if self._tiers.find(key) is None]
        listed: set[bytes] = set()
        for first in range(0, len(absent), _BATCH_CHUNKS):
            listed |= await self._pull_some(source, absent[first : first + _BATCH_CHUNKS], level, within)
        unlisted = [key for key in generations if key not in listed]
        if level is not Durability.MEMORY:
            unlisted = await self._tiers.raise_level(unlisted, level)
        joining = {key: within[key] for key in unlisted if key in within}
        if joining:
            listed |= await self._tiers.join(joining)
        if unnamed_keys := [key for key in unlisted if key not in within]:
            listed |= await self._tiers.reregister(unnamed_keys)
        copied = set(absent)
        return [(COPIED if key in copied else KEPT) if key in listed else LACKED for key in generations]

    async def entries_of(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Return the generations of the entries that copies of these chunks are to be listed in, by key.

        Those that list this node now, or did last. Chunks that were read from the object tier, and are listed nowhere
        here, have the entries that list the object tier.
        """
        recorded = {key: self._tiers.residency.recorded(key) or 0 for key in keys}
        unlisted = [key for key, generation in recorded.items() if not generation]
        if unlisted and self._tiers.objects is not None:
            records = [header.chunk.record for key in unlisted if (header := self._tiers.find(key)) is not None]
            recorded |= (await self._registry.object_generations(records))[0]
        return {key: generation for key, generation in recorded.items() if generation}

    async def spread(self, keys: Sequence[bytes]) -> set[bytes]:
        """See to it that each chunk is on a drive of a second live node; those for which that is so."""
        return (await self._spread_marked(keys))[0]

    async def _spread_marked(self, keys: Sequence[bytes]) -> tuple[set[bytes], int]:
        """Run `_spread`; no other task spreads these at the same time."""
        self._spreading.update(keys)
        try:
            return await self._spread(keys)
        finally:
            self._spreading.subtract(keys)
            self._spreading = +self._spreading

    async def _spread(self, keys: Sequence[bytes]) -> tuple[set[bytes], int]:
        """Keys of those that are safe now, and how many bytes were copied for that."""
        chunks = self._tiers.find_all(keys)
        holders = await self._index.locate([chunk.record for chunk in chunks])
        already = {name for of_chunk in holders for name in of_chunk}
        sources = {self._config.node_id, OBJECT_TIER}  # the index would refuse a copy of a chunk that it does not list
        unsafe = [chunk.key for chunk, names in zip(chunks, holders, strict=True) if not sources.isdisjoint(names)]
        safe, copied = set[bytes](), set[bytes]()
        for target in await self.candidates(unsafe, already):
            generations = await self.entries_of(unsafe)
            if not generations:
                break
            try:
                marks = await self._peers.replicate(target, generations, self._me())
            except QuireError as error:
                logger().warning("a node took no replicas", node=target.node_id, error=str(error))
                continue
            present = {key for key, mark in zip(generations, marks, strict=True) if mark != LACKED}
            copied |= {key for key, mark in zip(generations, marks, strict=True) if mark == COPIED}
            self._elsewhere |= dict.fromkeys(present, redundancy.start_of(target))
            safe |= present
            unsafe = [key for key in unsafe if key not in safe]
            if not unsafe:
                break
        return safe, sum(chunk.bytes for chunk in chunks if chunk.record.key in copied)

    async def copies(self, chunk: Chunk) -> AsyncIterator[Bytes]:
        """The chunk's (L, S) bytes as other nodes have them, the nearest first, then the object tier's."""
        try:
            holders = (await self._index.locate([chunk.record]))[0]
            nodes = {node.node_id: node for node in await self._peers.storage_nodes()}
        except QuireError as error:
            logger().warning("the index does not say where other copies are", error=str(error))
            holders, nodes = (), {}
        location = self._me().location
        sources = [nodes[name] for name in holders if name in nodes and name != self._config.node_id]
        for node in sorted(sources, key=lambda node: location.distance(node.location)):
            async for _, payload in self.fetch(node, [chunk.record.key]):
                yield payload
        if self._tiers.objects is not None:
            generation = self._tiers.residency.generation(chunk.record.key) or 0
            if (chunk_object := await self._tiers.objects.chunk(chunk.record.key, generation)) is not None:
                yield chunk_object[1]

    async def fetch(self, source: Node, keys: Sequence[bytes]) -> AsyncIterator[tuple[Chunk, Bytes]]:
        """Yield chunks of another node with their (L, S) bytes, verified, without missing or damaged ones."""
        async for batch, payloads in self.fetch_batches(source, keys):
            for pair in zip(batch, payloads, strict=True):
                yield pair

    async def fetch_batches(
        self, source: Node, keys: Sequence[bytes]
    ) -> AsyncIterator[tuple[list[Chunk], list[Bytes]]]:
        """The same, as they come: chunks of one shape, and the bytes of each."""
        try:
            headers = await self._peers.describe(source, ChunkKeys(b"".join(keys)))
        except QuireError as error:
            logger().warning("a node does not describe its chunks", node=source.node_id, error=str(error))
            return
        sound = [np.frombuffer(raw, dtype=np.uint8) for raw in headers if sound_header(raw) is not None]
        chunks = [unpack_header(raw).chunk for raw in sound]
        chunks = [chunk for chunk in chunks if chunk.record.key in set(keys)]
        while chunks:
            shape = chunks[0].shape
            count = max(1, _LANDING_BYTES // shape.bytes)
            batch = [chunk for chunk in chunks if chunk.shape == shape][:count]
            taken = {chunk.record.key for chunk in batch}
            chunks = [chunk for chunk in chunks if chunk.record.key not in taken]
            landed = [pair async for pair in self._land(source, batch)]
            if landed:
                yield [chunk for chunk, _ in landed], [payload for _, payload in landed]

    async def keep_replicated(self) -> None:
        """See to it that replicated chunks have two live holders that stay.

        After a change of these nodes those whose other copy may be lost are checked; without one all, some at a time.
        The chunks of a node that is to be removed are copied by `Drainer`.
        """
        while True:
            await self._clock.sleep(self._config.replication_check_s)
            try:
                nodes = await self._peers.storage_nodes()
                starts = set(map(redundancy.start_of, redundancy.counted(nodes)))
                if any(node.node_id == self._config.node_id and not node.stays for node in nodes):
                    self._known, self._pending, self._alone = starts, 0, set()
                elif starts == self._known:
                    await self._patrol()
                elif await self._respread(starts):
                    self._known = starts
                else:
                    await self._clock.sleep(_RESPREAD_PAUSE_S)
            except QuireError as error:
                logger().warning("replicas cannot be checked now", error=str(error))

    # ----

    async def _respread(self, nodes: set[_Start]) -> bool:
        """Return whether all chunks without a copy on any of these are safe, as far as is known."""
        self._known = None
        keys = await self._without_copy(nodes)
        self._pending, self._alone = len(keys), set()
        for first in range(0, len(keys), _BATCH_CHUNKS):
            # A chunk that is being stored is on its way to a node, and not to the one that would be chosen here.
            batch = keys[first : first + _BATCH_CHUNKS]
            part = [key for key in batch if key not in self._spreading]
            safe, copied_bytes = await self._spread_marked(part)
            unsafe = self._tiers.find_all([key for key in part if key not in safe])
            self._pending -= len(batch)
            self._alone.update(chunk.record.key for chunk in unsafe)
            await self._clock.sleep(copied_bytes / self._config.replication_bytes_per_s)
        return not self._alone

    async def _without_copy(self, nodes: set[_Start]) -> list[bytes]:
        single: list[bytes] = []
        for at, key in enumerate(list(self._tiers.residency.replicated)):
            if self._elsewhere.get(key) not in nodes:
                single.append(key)
            if at % _SLICE_CHUNKS == 0:
                await asyncio.sleep(0)
        return single

    async def _patrol(self) -> None:
        """Look at the next replicated chunks: spread those that no other node has, give up copies beyond the second."""
        if not self._round:
            self._round = deque(self._tiers.residency.replicated)
            self._elsewhere = {key: self._elsewhere[key] for key in self._round if key in self._elsewhere}
        part = [self._round.popleft() for _ in range(min(_PATROL_CHUNKS, len(self._round)))]
        chunks = self._tiers.find_all(part)
        me = self._config.node_id
        alone: list[bytes] = []
        surplus: dict[tuple[str, ...], list[bytes]] = {}
        holders = await self._index.locate([chunk.record for chunk in chunks]) if chunks else []
        nodes = redundancy.counted(await self._peers.storage_nodes())
        starts = {node.node_id: redundancy.start_of(node) for node in nodes}
        zones = {node.node_id: node.location.zone for node in nodes}
        for chunk, listed in zip(chunks, holders, strict=True):
            keepers = keepers_of(chunk.key, [name for name in listed if name in zones], zones)
            peers = [starts[name] for name in keepers if name != me and name in starts]
            if peers:
                self._elsewhere[chunk.key] = peers[0]
            else:
                self._elsewhere.pop(chunk.key, None)
            if keepers == (me,) and chunk.key not in self._spreading:
                alone.append(chunk.key)
            elif me in listed and me not in keepers:
                surplus.setdefault(keepers, []).append(chunk.key)
        self._alone.difference_update(part)
        for first in range(0, len(alone), _BATCH_CHUNKS):
            batch = alone[first : first + _BATCH_CHUNKS]
            safe = await self.spread(batch)
            unsafe = self._tiers.find_all([key for key in batch if key not in safe])
            self._alone.update(chunk.record.key for chunk in unsafe)
        for keepers, keys in surplus.items():
            if given_up := await self.give_up(keys, keepers, Durability.REPLICATED):
                logger().info("gave up copies beyond the second", chunks=given_up)

    async def give_up(self, keys: Sequence[bytes], keepers: Sequence[str], level: Durability) -> int:
        """Give up copies that others keep; return how many.

        The one rule for giving up a copy:

        - each of `keepers` lives, and has said just now that it has the chunk; for a level above `memory`, on a drive;
        - this node's copy is at `level` at most, also when the index answers;
        - the index takes this node off an entry only while it lists each keeper for it and no lease pins the chunk.
        """
        nodes = {node.node_id: node for node in await self._peers.storage_nodes()}
        safe = set(keys) if keepers and all(name in nodes for name in keepers) else set()
        for name in keepers:
            unconfirmed = [key for key in keys if key in safe]
            if unconfirmed:
                safe &= await self._confirmed(nodes[name], unconfirmed, level)
        return await self._tiers.evict([key for key in keys if key in safe], keepers=keepers, level=level)

    async def _confirmed(self, keeper: Node, keys: Sequence[bytes], level: Durability) -> set[bytes]:
        packed = ChunkKeys(b"".join(keys))
        if level is Durability.MEMORY:
            sound = [raw for raw in await self._peers.describe(keeper, packed) if sound_header(raw) is not None]
            return {unpack_header(np.frombuffer(raw, dtype=np.uint8)).chunk.key for raw in sound}
        generations = await self.entries_of(keys)
        marks = await self._peers.replicate(keeper, generations, self._me()) if generations else []
        return {key for key, is_kept in zip(generations, marks, strict=True) if is_kept}

    async def candidates(self, keys: Sequence[bytes], already: set[str]) -> list[Node]:
        """Other nodes that stay: the farthest first, of these those that have some of the chunks, then by their claim.

        `already`: names of nodes that have some.
        """
        if not keys:
            return []
        me = self._me()

        def preference(node: Node) -> tuple[int, bool, bytes]:
            return -me.location.distance(node.location), node.node_id not in already, _claim(keys[0], node.node_id)

        nodes = await self._peers.storage_nodes()
        return sorted((node for node in nodes if node.stays and node.node_id != me.node_id), key=preference)

    async def _pull_some(
        self, source: Node, keys: Sequence[bytes], level: Durability, within: Mapping[bytes, int]
    ) -> set[bytes]:
        """Keys of those that are listed here now."""
        listed: set[bytes] = set()
        async for batch, payloads in self.fetch_batches(source, keys):
            try:
                async with self._tiers.reserved(batch[0].shape, len(batch)) as slots:
                    for index, payload in enumerate(payloads):
                        self._tiers.lay(slots, index, payload)
                    async with self._tiers.storing(slots, batch, level, within=within) as stored:
                        listed |= stored.now()
            except QuireError as error:
                logger().warning("copies of another node's chunks could not be kept", error=str(error))
        return listed

    async def _land(self, source: Node, batch: Sequence[Chunk]) -> AsyncIterator[tuple[Chunk, Bytes]]:
        """Chunks of one shape, delivered by their node into memory of this one."""
        layers, size = batch[0].num_layers, batch[0].slice_bytes
        async with self._landing[source.node_id], self._landing_turns:
            while self._quarantined and self._quarantined[0][0] <= self._clock.monotonic_s():
                self._quarantined.popleft()[1].close()
            if len(self._quarantined) >= _QUARANTINED_MAX:
                logger().error("no copies are pulled: too much memory is quarantined", buffers=len(self._quarantined))
                return
            memory = np.frombuffer(anonymous_memory(len(batch) * layers * size), dtype=np.uint8)
            region = self._transport.register(memory)
            target = RdmaTarget(self._transport.address, region.address, region.length, region.remote_key)
            keys = ChunkKeys(b"".join(chunk.record.key for chunk in batch))
            descriptor = Descriptor(keys, layers, 1, size, DeliveryOrder.CHUNKWISE, target)
            quiesced = False
            try:
                outcome = await self._peers.deliver(source, descriptor)
                quiesced = outcome.quiesced
            except QuireError as error:
                quiesced = not may_be_in_use(error)  # it refused, before the first byte
                logger().warning("a node did not deliver", node=source.node_id, error=str(error))
                return
            finally:
                if quiesced:
                    region.close()
                else:
                    # Until every permit for it has ended: by then its node is quiet, or dead.
                    self._quarantined.append(
                        (self._clock.monotonic_s() + quiescence.unheard_s(COPY_S_MAX), region, memory)
                    )
            if outcome.error_code or not outcome.quiesced:
                logger().warning("a node did not deliver", node=source.node_id, error=outcome.error_message)
                return
        self._copied.add(memory.nbytes)
        rows = memory.reshape(layers, len(batch), size)
        for index, chunk in enumerate(batch):
            payload = np.ascontiguousarray(rows[:, index])
            if np.array_equal(row_checksums(payload), chunk.checksums):
                yield chunk, payload


def keepers_of(key: bytes, holders: Sequence[str], zones: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes that keep their copies, of the `holders`, which stay.

    These have the lowest claims, so that all nodes choose the same; they are in several zones if possible. `zones`: of
    the nodes that are alive, by name.
    """
    names = sorted((name for name in holders if name != OBJECT_TIER), key=lambda name: _claim(key, name))
    keepers: list[str] = []
    while names and len(keepers) < COPIES:
        taken = {zones.get(name) for name in keepers}
        keepers.append(next((name for name in names if zones.get(name) not in taken), names[0]))
        names.remove(keepers[-1])
    return tuple(keepers)


def _claim(key: bytes, node_id: str) -> bytes:
    return hashlib.blake2b(key + node_id.encode(), digest_size=8).digest()
