"""Fetches and stores: one request in, one per storage node out, their outcomes gathered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeVar

from quire.model.descriptor import Descriptor, RdmaTarget
from quire.model.durability import Durability, OnExisting
from quire.model.errors import (
    DeadlineExceeded,
    InternalError,
    QuireError,
    TargetInvalid,
    Unavailable,
)
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.nodes import NodeAddress
from quire.model.outcome import FetchSummary, NodeOutcome, StoreSummary
from quire.model.policy import TenantPolicy
from quire.model.ranges import ChunkRange, clip
from quire.model.records import NO_NAMESPACE, ChunkRecords, records
from quire.model.transfers import DeliverOrder, IngestOrder, PrefetchOrder
from quire.model.urgency import Urgency
from quire_gateway.config import GatewayConfig
from quire_gateway.core.plan import NodeShare, delivered_mask, shares, usable_chunks
from quire_gateway.errors import TransfersExhausted
from quire_gateway.kv.contacted_nodes import contacted, finished, is_touching
from quire_gateway.kv.following import Announcements
from quire_gateway.ports import Allocator, LayerArrived, StorageNodes

Summary = TypeVar("Summary")
_RETRY_S: Final = 0.1


class Readable(Protocol):
    """Readable chunks: a `Lease`, or a `LookupAnswer`."""

    @property
    def ranges(self) -> Sequence[ChunkRange]:
        """Ranges of the matched chunks, with the nodes that deliver them."""

    @property
    def addresses(self) -> Mapping[str, str]:
        """Addresses of those nodes' gRPC servers, by node."""

    @property
    def tenant(self) -> TenantPolicy:
        """Tenant of the request, with its share of links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchCall:
    """A fetch of matched chunks.

    `unchained`: the keys are no prefix, each chunk stands for itself. `transfer_ms`: for how long the client lends its
    memory; 0 for as long as this gateway permits transfers. `namespace`: tag of the namespace that the keys were
    derived under; empty if they were not. `arriving`: those of the chunks whose store is running; a node waits for them
    for `follow_s` at most.
    """

    found: Readable
    delivery_id: bytes
    descriptor: Descriptor
    urgency: Urgency = field(default_factory=Urgency)
    layers_in_stream: bool = False
    unchained: bool = False
    transfer_ms: int = 0
    namespace: bytes = b""
    arriving: Sequence[ChunkRange] = ()
    follow_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCall:
    """A store as the client asked for it; `keys`: the whole prefix; the source holds those from `first` on.

    `unchained`: the keys are no prefix, each chunk stands for itself.
    """

    namespace: Namespace
    keys: ChunkKeys
    first: int
    store_id: bytes
    source: RdmaTarget
    durability: Durability
    on_existing: OnExisting
    source_complete: bool = False
    tenant: str = ""
    unchained: bool = False
    transfer_ms: int = 0


@dataclass(frozen=True, slots=True)
class StorePlacement:
    """Placement of a store."""

    ranges: Sequence[ChunkRange]
    nodes: Sequence[NodeAddress]
    known_chunks: int


class KvTransfers:
    """Stateless but for the bound on transfers, and the announcements of running stores."""

    def __init__(
        self, *, config: GatewayConfig, allocator: Allocator, nodes: StorageNodes, announcements: Announcements
    ) -> None:
        self._config = config
        self._allocator = allocator
        self._nodes = nodes
        self._announcements = announcements
        self._transfers = 0

    @property
    def transfers(self) -> int:
        return self._transfers

    async def fetch(self, fetch: FetchCall) -> AsyncIterator[LayerArrived | NodeOutcome | FetchSummary]:
        """Every node's events as they come; the summary last. Closing the iterator early stops the nodes."""
        descriptor, readable = fetch.descriptor, fetch.found
        outcomes: list[NodeOutcome] = []
        with self._transfer():
            ranges = [*readable.ranges, *fetch.arriving]
            parts = shares(clip(ranges, descriptor.first_chunk, descriptor.stop_chunk), readable.addresses)
            async with _gathered([self._deliver(fetch, share) for share in parts]) as events:
                async for event in events:
                    if isinstance(event, NodeOutcome):
                        outcomes.append(event)
                    yield event
        mask = delivered_mask(outcomes, descriptor.first_chunk, descriptor.chunks)
        moved_bytes = sum(outcome.bytes_moved for outcome in outcomes)
        yield FetchSummary(usable_chunks(mask), moved_bytes, delivered=mask)

    async def prefetch(self, readable: Readable, namespace: Namespace, keys: ChunkKeys, within_s: float) -> int:
        """Have matched chunks brought into the memory of the nodes that would deliver them; returns how many are there.

        Raises the first node's error if all have failed.
        """
        with self._transfer():
            requests = (
                self._nodes.prefetch(
                    share.grpc_address,
                    PrefetchOrder(
                        keys=keys,
                        ranges=share.ranges,
                        layout=namespace.layout,
                        within_s=within_s,
                        namespace=namespace.tag,
                    ),
                )
                for share in shares(readable.ranges, readable.addresses)
            )
            answers = await asyncio.gather(*requests, return_exceptions=True)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures and (len(failures) == len(answers) or not isinstance(failures[0], QuireError)):
            raise failures[0]
        return sum(answer for answer in answers if isinstance(answer, int))

    async def store(self, store: StoreCall) -> AsyncIterator[StorePlacement | NodeOutcome | StoreSummary]:
        """The placement first, so that the client can announce its layers; then outcomes; the summary last."""
        source_chunks = store.keys.count_from(store.first)
        needed = store.namespace.layout.payload_bytes(source_chunks)
        if store.source.length < needed:
            raise TargetInvalid(f"{store.source.length} bytes, but the chunks have {needed}", field="source.length")
        outcomes: list[NodeOutcome] = []
        with self._transfer():
            placed = await self._allocator.allocate(
                store.namespace, store.keys, store.first, store.durability, store.on_existing, store.unchained
            )
            yield StorePlacement(placed.ranges, placed.nodes, placed.known_chunks)
            nodes = {node.node_id: node for node in placed.nodes}
            parts = shares(placed.ranges, {name: node.grpc_address for name, node in nodes.items()})
            with self._announced(store, placed.ranges):
                async with _gathered([self._ingest(store, share, nodes[share.node_id]) for share in parts]) as events:
                    async for outcome in events:
                        outcomes.append(outcome)
                        yield outcome
        stored = sum(sum(outcome.delivered) for outcome in outcomes)
        yield StoreSummary(stored, placed.known_chunks, sum(outcome.bytes_moved for outcome in outcomes))

    async def fetch_whole(self, fetch: FetchCall) -> FetchSummary:
        """A fetch to its end. Raises the first node's failure; see `NodeOutcome.check`."""
        return await _to_the_end(self.fetch(fetch), FetchSummary)

    async def store_whole(self, store: StoreCall) -> StoreSummary:
        """A store to its end. Raises the first node's failure; see `NodeOutcome.check`."""
        return await _to_the_end(self.store(store), StoreSummary)

    def _announced(self, store: StoreCall, ranges: Sequence[ChunkRange]) -> contextlib.AbstractContextManager[None]:
        if store.unchained or not ranges:
            return contextlib.nullcontext()
        return self._announcements.announced(store.keys, ranges, store.store_id, store.transfer_ms)

    @contextlib.contextmanager
    def _transfer(self) -> Iterator[None]:
        if self._transfers >= self._config.transfers_max:
            raise TransfersExhausted(f"{self._transfers} transfers are running", retry_after_s=_RETRY_S)
        self._transfers += 1
        try:
            yield
        finally:
            self._transfers -= 1

    async def _deliver(self, fetch: FetchCall, share: NodeShare) -> AsyncIterator[LayerArrived | NodeOutcome]:
        descriptor = fetch.descriptor
        arriving = frozenset(clip(fetch.arriving, descriptor.first_chunk, descriptor.stop_chunk))
        order = DeliverOrder(
            tenant=fetch.found.tenant,
            delivery_id=fetch.delivery_id,
            descriptor=descriptor,
            ranges=share.ranges,
            node_index=share.index,
            urgency=fetch.urgency,
            layers_in_stream=fetch.layers_in_stream,
            unchained=fetch.unchained,
            namespace=fetch.namespace or NO_NAMESPACE,
            arriving=tuple(run for run in share.ranges if run in arriving),
            follow_s=fetch.follow_s,
        )
        contacted(share.node_id)
        try:
            async for event in self._nodes.deliver(share.grpc_address, order, fetch.transfer_ms):
                if isinstance(event, NodeOutcome):
                    _note(event)
                yield event
        except QuireError as error:
            outcome = _failed(share, error)
            _note(outcome)
            yield outcome
        except (asyncio.CancelledError, GeneratorExit):
            await self._stop(share, fetch.delivery_id)
            raise

    async def _ingest(self, store: StoreCall, share: NodeShare, node: NodeAddress) -> AsyncIterator[NodeOutcome]:
        chunks = ChunkRecords.joined(
            [records(store.keys, part.first, part.count, unchained=store.unchained) for part in share.ranges]
        )
        order = IngestOrder(
            layout=store.namespace.layout,
            namespace_digest=store.namespace.digest(),
            store_id=store.store_id,
            records=chunks,
            source=store.source,
            source_ranges=tuple(replace(part, first=part.first - store.first) for part in share.ranges),
            source_chunks=len(store.keys) - store.first,
            node_index=share.index,
            durability=store.durability,
            on_existing=store.on_existing,
            source_complete=store.source_complete,
            tenant=store.tenant,
        )
        contacted(share.node_id)
        try:
            outcome = await self._nodes.ingest(node, order, store.transfer_ms)
        except QuireError as error:
            outcome = _failed(share, error)
        except (asyncio.CancelledError, GeneratorExit):
            await self._stop(share, store.store_id)
            raise
        _note(outcome)
        yield outcome

    async def _stop(self, share: NodeShare, transfer_id: bytes) -> None:
        """Stop an aborted transfer. If the node does not answer, the client waits for its `Quiesced`."""
        if is_touching(share.node_id):
            with contextlib.suppress(QuireError):
                await self._nodes.stop(share.grpc_address, transfer_id, share.index)
                finished(share.node_id)


async def _to_the_end(transfer: AsyncIterator[Any], summary: type[Summary]) -> Summary:
    failed: NodeOutcome | None = None
    last: Any = None
    async with contextlib.aclosing(transfer) as events:  # type: ignore[type-var]
        async for last in events:
            if isinstance(last, NodeOutcome) and last.error_code:
                failed = failed or last
    if failed is not None:
        failed.check()
    assert isinstance(last, summary), "the last event"
    return last


def _note(outcome: NodeOutcome) -> None:
    if outcome.quiesced:
        finished(outcome.node_id)


def _failed(share: NodeShare, error: QuireError) -> NodeOutcome:
    # A node that refused, or that was never asked, has written nothing; a silent one may still be writing.
    refused = error.unsent or not isinstance(error, Unavailable | DeadlineExceeded | InternalError)
    return NodeOutcome(
        share.node_id,
        share.ranges,
        bytes(sum(run.count for run in share.ranges)),
        quiesced=refused,
        error_code=error.code(),
        error_message=str(error),
    )


@contextlib.asynccontextmanager
async def _gathered(sources: Sequence[AsyncIterator[Any]]) -> AsyncIterator[AsyncIterator[Any]]:
    """Events of all sources as they come. On leaving, what still runs is cancelled and waited for."""
    if len(sources) == 1:  # the usual case needs neither task nor queue
        async with contextlib.aclosing(sources[0]) as only:  # type: ignore[type-var]
            yield only
        return
    queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=64)
    done = object()

    async def pump(source: AsyncIterator[Any]) -> None:
        try:
            async with contextlib.aclosing(source) as events:  # type: ignore[type-var]
                async for event in events:
                    await queue.put(event)
            await queue.put(done)
        except Exception as error:
            await queue.put(error)

    async def events() -> AsyncIterator[Any]:
        running = len(sources)
        while running:
            event = await queue.get()
            if event is done:
                running -= 1
            elif isinstance(event, Exception):
                raise event
            else:
                yield event

    runners: list[Coroutine[Any, Any, None]] = [pump(source) for source in sources]
    tasks = [asyncio.create_task(runner) for runner in runners]
    try:
        yield events()
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
