"""Calls of `Client`. Made of `AsyncClient` by `make generated`; do not edit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.client.blocking.loop import SyncLoop
from quire.client.blocking.transfers import SyncDelivery, SyncRetrieval, SyncStoreSession
from quire.client.delivery import Delivery
from quire.client.lookup import Lookup, Prompt, SlicePlaces
from quire.client.memory.buffers import Buffer
from quire.model.assignment import Assignment, Engine
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability, OnExisting
from quire.model.hashing import Namespace
from quire.model.health import Check
from quire.model.keys import ChunkKeys
from quire.model.nodes import Node
from quire.model.urgency import Urgency


class SyncCalls(SyncLoop):
    """Methods as in `AsyncClient`, blocking; safe from any thread."""

    def lookup(
        self,
        namespace: Namespace,
        keys: ChunkKeys,
        *,
        lease_ttl_ms: int = 60000,
        prompt: Prompt | None = None,
        unchained: bool = False,
    ) -> Lookup:
        """Look up the longest cached prefix, leased for `lease_ttl_ms` (0: no lease, and no side effect).

        With the whole prompt, and a device of which the cluster has a profile: also how much of the prefix to take (see
        `Advice`); a fetch of it then takes that part, and knows its compute window.
        `unchained`: the keys are no prefix, each stands for itself, and was stored so; without lease and advice.

        Of a long prefix the client sends a sample of the keys, as each block key covers those before it. For keys that
        do not, `matched_chunks` may count chunks that are not stored; a fetch then misses them.

        Raises `KeysInvalid` for a key that is sent twice, `InvalidRequest` for a lifetime beyond the cluster's,
        `NotAllowed` for another tenant's salt, `TooManyRequests` with `retry_after_s`, `Unavailable`,
        `DeadlineExceeded`: without an answer compute the prefix.
        """
        return self.run(
            self._client.lookup(namespace, keys, lease_ttl_ms=lease_ttl_ms, prompt=prompt, unchained=unchained)
        )

    def lookup_shards(
        self, shards: Sequence[tuple[Namespace, ChunkKeys]], *, lease_ttl_ms: int = 60000, unchained: bool = False
    ) -> list[Lookup]:
        """Look up the same blocks in every rank of an engine, by one request; an answer for each. See `lookup`."""
        return self.run(self._client.lookup_shards(shards, lease_ttl_ms=lease_ttl_ms, unchained=unchained))

    def fetch(
        self,
        lookup: Lookup,
        buffer: Buffer,
        *,
        first_chunk: int = 0,
        chunk_count: int | None = None,
        places: SlicePlaces | None = None,
        order: DeliveryOrder | str = DeliveryOrder.AUTO,
        urgency: Urgency | None = None,
    ) -> SyncDelivery:
        """Have matched chunks delivered into `buffer`, laid out as (layers, chunks, slice bytes) or as `places` says.

        `first_chunk`: those before it are here already. `chunk_count`: None for as many as the look-up says should be
        taken (`Lookup.take_chunks`), up to there. `urgency`: when layers are needed: bandwidth and reads of drives go
        by it. None: as the look-up advised, or unknown. The delivery runs when this returns.

        Raises `TargetInvalid` for a buffer that is too small or in use there, `DescriptorInvalid` for chunks that did
        not match, `PeerLost` where no storage node is reached.
        """
        return SyncDelivery(
            self,
            self.run(
                self._client.fetch(
                    lookup,
                    buffer,
                    first_chunk=first_chunk,
                    chunk_count=chunk_count,
                    places=places,
                    order=order,
                    urgency=urgency,
                )
            ),
        )

    def retrieve(
        self,
        namespace: Namespace,
        keys: ChunkKeys,
        buffer: Buffer,
        *,
        first_chunk: int = 0,
        places: SlicePlaces | None = None,
        lease_ttl_ms: int = 60000,
        prompt: Prompt | None = None,
        order: DeliveryOrder | str = DeliveryOrder.AUTO,
        urgency: Urgency | None = None,
        unchained: bool = False,
        follow_s: float = 0.0,
        part_s: float = 0.0,
        on_begin: Callable[[Delivery], None] | None = None,
    ) -> SyncRetrieval:
        """Look up, lease and have delivered, in one exchange: layers are on their way when this returns.

        As `lookup`, then `fetch` of the matched, or advised, chunks behind `first_chunk`. The buffer has room for all
        of `keys` from there on: slices lie as if all of them were delivered. Without a lease (0) chunks that are
        evicted during the transfer are missing in the end; nodes hold what they have begun to deliver. `unchained`: as
        for `lookup`; stored chunks are delivered, each to its place among all. `follow_s`: chunks whose store runs are
        delivered, too, each layer as soon as a node has it; other keys are waited for, for that long and half of the
        client's `timeout_s` at most, and if `part_s` is not 0, no longer than it once chunks from `first_chunk` on can
        be read or arrive. `on_begin`: called with the delivery before the answer.

        Raises the errors of `lookup` and `fetch`. After `DeadlineExceeded` or `Unavailable` the buffer may stay lent:
        if the answer was lost, nodes may be writing.
        """
        return SyncRetrieval(
            self,
            self.run(
                self._client.retrieve(
                    namespace,
                    keys,
                    buffer,
                    first_chunk=first_chunk,
                    places=places,
                    lease_ttl_ms=lease_ttl_ms,
                    prompt=prompt,
                    order=order,
                    urgency=urgency,
                    unchained=unchained,
                    follow_s=follow_s,
                    part_s=part_s,
                    on_begin=on_begin,
                )
            ),
        )

    def store(
        self,
        namespace: Namespace,
        keys: ChunkKeys,
        first_chunk: int,
        buffer: Buffer,
        *,
        durability: Durability | str = Durability.LOCAL,
        on_existing: OnExisting | str = OnExisting.SKIP,
        complete: bool = False,
        unchained: bool = False,
    ) -> SyncStoreSession:
        """Store chunks from `first_chunk` on; `keys` are those of the whole prefix, whose earlier chunks are stored.

        `buffer` is laid out as (layers, chunks from first_chunk on, slice bytes) and read as layers are announced; it
        stays lent until the session has quiesced. `durability`: level of the acknowledgement (see `Durability`).
        `on_existing`: SKIP keeps the bytes that are stored under a key, VERIFY reads the bytes and compares.
        `complete`: all layers are in the buffer, and none will be announced; chunks are then written to drives while
        the chunks behind them are read. `unchained`: the keys are no prefix, each chunk stands for itself; some of them
        may be stored already.

        Raises `InvalidRequest`, `KeysInvalid`, `TargetInvalid` for a buffer that is too small or lent, `NotAllowed`,
        `NoStorageNode`, `TooManyRequests` with `retry_after_s`, `PeerLost`, `DeadlineExceeded`: nothing is stored then.
        What becomes of the chunks `StoreSession.commit` tells.
        """
        return SyncStoreSession(
            self,
            self.run(
                self._client.store(
                    namespace,
                    keys,
                    first_chunk,
                    buffer,
                    durability=durability,
                    on_existing=on_existing,
                    complete=complete,
                    unchained=unchained,
                )
            ),
        )

    def reach(self) -> None:
        """Make sure, once, that the data plane reaches the cluster, before a node receives an address here.

        UCX ends a process that is connected to by a peer to which it has no way back. To a cluster with tokens it is
        proved, too, that the address on the data plane is this process's own. Raises `PeerLost`, `NotAllowed`.
        """
        self.run(self._client.reach())

    def release(self, lookup: Lookup) -> bool:
        """Give the lease back; whether it was still valid. Raises `LeaseForged`, `Unavailable`, `DeadlineExceeded`."""
        return self.run(self._client.release(lookup))

    def evict(self, namespace: Namespace, keys: ChunkKeys, *, keep_chunks: int = 0) -> int:
        """Drop chunks from the end of a prefix, but for the first `keep_chunks`; how many were dropped.

        Those that a lease pins, or that other prefixes extend, stay. Raises `NotAllowed`, `Unavailable`,
        `DeadlineExceeded`.
        """
        return self.run(self._client.evict(namespace, keys, keep_chunks=keep_chunks))

    def demote(self, namespace: Namespace, keys: ChunkKeys, *, keep_chunks: int = 0) -> int:
        """Have nodes give up chunks that the object tier has, but for the first `keep_chunks`; they can still be read.

        Leases keep copies where they are; other prefixes and levels below `object` do not. Returns how many chunks the
        object tier has, and no node. Raises `NotAllowed`, `Unavailable`, `DeadlineExceeded`.
        """
        return self.run(self._client.demote(namespace, keys, keep_chunks=keep_chunks))

    def assign(
        self, namespace: Namespace, keys: ChunkKeys, prompt_tokens: int, engines: Sequence[Engine]
    ) -> Assignment:
        """Choose the engine that is to prefill a prompt whose whole chunks have these keys. Raises `InvalidRequest`."""
        return self.run(self._client.assign(namespace, keys, prompt_tokens, engines))

    def retain(self, namespace: Namespace, keys: ChunkKeys, seconds: float, *, holder: str = "") -> int:
        """Keep the longest stored prefix from being evicted for `seconds`; how many chunks it has.

        The retention outlives this client, and belongs to `holder`, for example a conversation; empty for the tenant.
        Calling again for the same prefix never shortens the time; a longer prefix has a retention of its own. Raises
        `InvalidRequest` for longer than the gateway allows, `NotAllowed`, `Unavailable`, `DeadlineExceeded`.
        """
        return self.run(self._client.retain(namespace, keys, seconds, holder=holder))

    def end_retention(self, namespace: Namespace, keys: ChunkKeys, *, holder: str = "") -> bool:
        """End a holder's retentions on any of the keys; whether there was one. Raises as `retain`."""
        return self.run(self._client.end_retention(namespace, keys, holder=holder))

    def prefetch(self, namespace: Namespace, keys: ChunkKeys, *, within_s: float = 0.0) -> int:
        """Have the longest stored prefix brought into storage nodes' memory; returns how many chunks are there now.

        `within_s`: when they are wanted, seconds from now; of several prefetches the one that is due first is read
        first. At most half of a node's memory is filled; the rest stays where it is. Raises `NotAllowed`,
        `TooManyRequests`, `Unavailable`, `DeadlineExceeded`.
        """
        return self.run(self._client.prefetch(namespace, keys, within_s=within_s))

    def status(self, *, with_away: bool = False) -> Sequence[Node]:
        """The members; `with_away`: and storage nodes that are expected, but not alive. Raises as `health`."""
        return self.run(self._client.status(with_away=with_away))

    def health(self) -> Sequence[Check]:
        """The checks that the cluster fails, the worst first. Raises `Unavailable`, `DeadlineExceeded`."""
        return self.run(self._client.health())
