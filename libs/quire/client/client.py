"""The asynchronous client: metadata through the gateway, bytes by the data plane."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from quire.client import status
from quire.client.cache import AsyncKvCache
from quire.client.delivery import Delivery
from quire.client.lookup import Lookup, Prompt, SlicePlaces, descriptor_of, lookup_of, lookup_request
from quire.client.memory.buffers import Buffer, Loan
from quire.client.memory.own_address import OwnAddress
from quire.client.memory.quarantine import Quarantine
from quire.client.memory.route_check import RouteCheck
from quire.client.retrieval import Retrieval, first_of, follow_ms, retrieved
from quire.client.samples import SampledLookups
from quire.client.store import StoreSession
from quire.model.assignment import Assignment, Engine, EngineTable
from quire.model.descriptor import DeliveryOrder, Descriptor
from quire.model.durability import Durability, OnExisting
from quire.model.errors import NodeUnavailable, QuireError, ResourceExhausted
from quire.model.hashing import Namespace
from quire.model.health import Check
from quire.model.keys import ChunkKeys, check_keys, packed
from quire.model.layout import KvLayout
from quire.model.nodes import Location, Node
from quire.model.ranges import clip
from quire.model.urgency import Urgency
from quire.telemetry import names, tracer
from quire.transport import AddressNonce, Transport, data_plane_of_environment, decode_message
from quire.wire import convert
from quire.wire.channels import ChannelPool, Stop, call, stream
from quire.wire.convert_assignment import assign_request_to, assignment_from
from quire.wire.session import SessionChannel
from quire.wire.tls import Tls, tls_of_environment
from quire.wire.v1 import gateway_pb2 as pb
from quire.wire.v1.gateway_pb2_grpc import GatewayServiceStub

_UNQUIET_MAX: Final = 64
_CLOSE_TIMEOUT_S: Final = 5.0
_abandoned: Final[list[Buffer]] = []


class AsyncClient:
    """Client of one gateway, on one data plane and one event loop. `async with AsyncClient("host:port") as client`.

    `transport`, unless given, is shared memory with storage nodes of this host and UCX with others; QUIRE_SHARED_MEMORY
    and QUIRE_SHARED_MEMORY_UIDS are as for storage nodes. Every request has a deadline of `timeout_s`. `zone`: where
    this process runs; of several replicas one on this host, else one in this zone serves. `tls`, `token`: how to get
    in; unless given, QUIRE_CLIENT_CA, _CERT, _KEY (PEM files) and QUIRE_TOKEN say. `channels`: another way to the
    gateway than gRPC. `session`: ask over one stream, which owns leases and transfers and ends them with the client;
    else a call for each request.
    """

    def __init__(
        self,
        gateway_address: str,
        *,
        transport: Transport | None = None,
        timeout_s: float = 60.0,
        zone: str = "",
        tls: Tls | None = None,
        token: str = "",
        channels: ChannelPool | None = None,
        session: bool = True,
    ) -> None:
        self._address = gateway_address
        self._transport = transport
        self._timeout_s = timeout_s
        self._transfer_ms = max(1, round(1000 * timeout_s))  # transfers are permitted as long as their requests run
        self._location = Location(socket.gethostname(), zone)
        token = token or os.environ.get("QUIRE_TOKEN", "")
        self._channels = channels or ChannelPool(tls or tls_of_environment(), token)
        self._session: SessionChannel | None = None
        self._in_session, self._token = session, token
        self._transfers: dict[bytes, Delivery | StoreSession] = {}
        self.quarantine = Quarantine()
        """Memory of requests that ended so that a peer may still use it."""

    async def __aenter__(self) -> AsyncClient:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Open the data plane. Raises `ConfigInvalid` without UCX."""
        channel = self._channels.get(self._address)
        if self._in_session:
            channel = self._session = SessionChannel(channel, self._token)
        self._stub: GatewayServiceStub = GatewayServiceStub(channel)
        if self._transport is None:
            self._transport = data_plane_of_environment()
        await self._transport.start()
        self._transport.on_message(self._on_message)
        self._reachability = RouteCheck(self._transport, self.status)
        ask, session = partial(call, self._stub.Lookup, timeout_s=self._timeout_s), self._session
        self._lookups = SampledLookups(ask, self._location, lambda: session is not None and session.takes_samples)
        self._own_address = OwnAddress(self._transport, self._stub, self._timeout_s)

    async def close(self) -> None:
        """Stop every delivery, wait until every storage node has stopped writing here, disconnect.

        The memory of a delivery whose nodes stay silent is never given back to the process: they may still write to it.
        """
        self._reachability.close()
        self._own_address.close()
        running = list(self._transfers.values())
        for transfer in running:
            transfer.abandon()
        ends = await asyncio.gather(
            *(transfer.quiesced(_CLOSE_TIMEOUT_S) for transfer in running), return_exceptions=True
        )
        _abandoned.extend(transfer.buffer for transfer, end in zip(running, ends, strict=True) if end is not None)
        _abandoned.extend(self.quarantine.buffers)
        if self._session is not None:
            await self._session.close()
        await self._channels.close()
        await self.transport.close()

    @property
    def transport(self) -> Transport:
        """The data plane, once it is open."""
        assert self._transport is not None, "start() comes first"
        return self._transport

    def allocate(self, length: int) -> Buffer:
        """Allocate `length` bytes of registered, zeroed host memory. Close it after its last transfer.

        Raises `InvalidRequest` for a length that is not positive.
        """
        return Buffer.allocate(self.transport, length)

    def register(self, memory: Any) -> Buffer:
        """Register a contiguous numpy array or torch tensor in place; on a GPU where UCX can reach it.

        Raises `InvalidRequest` for anything else and for no bytes, `ValueError` for one that is not contiguous.
        """
        return Buffer.register(self.transport, memory)

    def cache(self, model: str, weights: str, layout: KvLayout, *, tenant_salt: bytes = b"") -> AsyncKvCache:
        """Return the state of one model by tokens. Arguments and errors as of `Client.cache`."""
        return AsyncKvCache(self, Namespace(model, weights, layout, tenant_salt))

    async def lookup(
        self,
        namespace: Namespace,
        keys: ChunkKeys,
        *,
        lease_ttl_ms: int = 60_000,
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
        check_keys(keys)
        with tracer().start_as_current_span(names.CLIENT_LOOKUP):
            shards = [(namespace, keys)]
            return (await self._lookups.find(shards, lease_ttl_ms, prompt=prompt, unchained=unchained))[0]

    async def lookup_shards(
        self, shards: Sequence[tuple[Namespace, ChunkKeys]], *, lease_ttl_ms: int = 60_000, unchained: bool = False
    ) -> list[Lookup]:
        """Look up the same blocks in every rank of an engine, by one request; an answer for each. See `lookup`."""
        with tracer().start_as_current_span(names.CLIENT_LOOKUP):
            return await self._lookups.find(shards, lease_ttl_ms, unchained=unchained)

    async def fetch(
        self,
        lookup: Lookup,
        buffer: Buffer,
        *,
        first_chunk: int = 0,
        chunk_count: int | None = None,
        places: SlicePlaces | None = None,
        order: DeliveryOrder | str = DeliveryOrder.AUTO,
        urgency: Urgency | None = None,
    ) -> Delivery:
        """Have matched chunks delivered into `buffer`, laid out as (layers, chunks, slice bytes) or as `places` says.

        `first_chunk`: those before it are here already. `chunk_count`: None for as many as the look-up says should be
        taken (`Lookup.take_chunks`), up to there. `urgency`: when layers are needed: bandwidth and reads of drives go
        by it. None: as the look-up advised, or unknown. The delivery runs when this returns.

        Raises `TargetInvalid` for a buffer that is too small or in use there, `DescriptorInvalid` for chunks that did
        not match, `PeerLost` where no storage node is reached.
        """
        urgency = urgency or Urgency()
        if not urgency.is_known and lookup.advice is not None:
            urgency = replace(urgency, compute_window_us=lookup.advice.window_us)
        descriptor = descriptor_of(
            lookup.namespace,
            lookup.keys,
            buffer,
            places,
            order=order,
            first_chunk=first_chunk,
            chunk_count=lookup.take_chunks - first_chunk if chunk_count is None else chunk_count,
        )
        self._check_room()
        await self.reach()
        transfer_id = os.urandom(16)
        request = pb.FetchRequest(
            lease=lookup.lease,
            delivery_id=transfer_id,
            descriptor=convert.descriptor_to(descriptor),
            compute_window_us=urgency.compute_window_us,
            transfer_ms=self._transfer_ms,
            first_layer_us=urgency.first_layer_us,
            priority=urgency.priority,
        )
        request.descriptor.target.CopyFrom(convert.target_to(buffer.target()))  # reaching may change it
        loan = buffer.lend(f"delivery {transfer_id.hex()}", descriptor)
        delivery = self._begin(transfer_id, descriptor, buffer, loan)
        try:
            delivery.place(clip(lookup.ranges, first_chunk, descriptor.stop_chunk), lookup.addresses)
        except QuireError:
            # Nothing was asked for yet, so no node will write.
            del self._transfers[transfer_id]
            delivery.unwatch()
            loan.end()
            raise
        stop = Stop()
        delivery.start(stream(self._stub.Fetch, request, timeout_s=self._timeout_s, stop=stop), stop)
        return delivery

    async def retrieve(
        self,
        namespace: Namespace,
        keys: ChunkKeys,
        buffer: Buffer,
        *,
        first_chunk: int = 0,
        places: SlicePlaces | None = None,
        lease_ttl_ms: int = 60_000,
        prompt: Prompt | None = None,
        order: DeliveryOrder | str = DeliveryOrder.AUTO,
        urgency: Urgency | None = None,
        unchained: bool = False,
        follow_s: float = 0.0,
        part_s: float = 0.0,
        on_begin: Callable[[Delivery], None] | None = None,
    ) -> Retrieval:
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
        check_keys(keys)
        descriptor = descriptor_of(
            namespace,
            keys,
            buffer,
            places,
            order=order,
            first_chunk=first_chunk,
            chunk_count=len(keys) - first_chunk,
        )
        urgency = urgency or Urgency()
        self._check_room()
        await self.reach()
        transfer_id = os.urandom(16)
        request = pb.RetrieveRequest(
            lookup=lookup_request(
                [(namespace, keys)], self._location, lease_ttl_ms, prompt=prompt, unchained=unchained
            ),
            delivery_id=transfer_id,
            descriptor=convert.descriptor_to(descriptor),
            compute_window_us=urgency.compute_window_us,
            transfer_ms=self._transfer_ms,
            first_layer_us=urgency.first_layer_us,
            priority=urgency.priority,
            follow_ms=follow_ms(follow_s, self._timeout_s),
            follow_part_ms=follow_ms(part_s, self._timeout_s),
        )
        request.descriptor.ClearField("chunk_keys")
        request.descriptor.target.CopyFrom(convert.target_to(buffer.target()))  # reaching may change it
        loan = buffer.lend(f"delivery {transfer_id.hex()}", descriptor)
        delivery = self._begin(transfer_id, descriptor, buffer, loan)
        lookup = asyncio.get_running_loop().create_future()
        read, stop = partial(lookup_of, namespace, keys), Stop()
        answers = stream(self._stub.Retrieve, request, timeout_s=self._timeout_s, stop=stop)
        delivery.start(retrieved(answers, delivery, first_chunk, read, lookup), stop)
        if on_begin is not None:
            on_begin(delivery)
        return await first_of(lookup, delivery, first_chunk)

    def _begin(self, transfer_id: bytes, descriptor: Descriptor, buffer: Buffer, loan: Loan) -> Delivery:
        delivery = self._transfers[transfer_id] = Delivery(
            transfer_id=transfer_id,
            num_layers=descriptor.num_layers,
            buffer=buffer,
            loan=loan,
            transport=self.transport,
            on_quiesced=lambda: self._transfers.pop(transfer_id, None),
            transfer_s=self._timeout_s,
        )
        return delivery

    def _check_room(self) -> None:
        if len(self._transfers) >= _UNQUIET_MAX:
            raise ResourceExhausted(f"{len(self._transfers)} transfers are running or not quiesced")

    async def store(
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
    ) -> StoreSession:
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
        check_keys(keys)
        chunks = keys.count_from(first_chunk)
        await self.reach()
        request = pb.StoreRequest(
            namespace=convert.namespace_to(namespace),
            chunk_keys=keys.packed,
            first_chunk=first_chunk,
            durability=convert.durability_to(durability),
            on_existing=convert.on_existing_to(on_existing),
            source_complete=complete,
            unchained=unchained,
            transfer_ms=self._transfer_ms,
        )
        try:
            return await self._start_store(request, buffer, namespace.layout, chunks)
        except NodeUnavailable as error:
            # The gateway went away before it had placed the chunks: where no layer was announced no node reads.
            if error.answered or complete:
                raise
            return await self._start_store(request, buffer, namespace.layout, chunks)

    async def _start_store(
        self, request: pb.StoreRequest, buffer: Buffer, layout: KvLayout, chunks: int
    ) -> StoreSession:
        transfer_id = os.urandom(16)
        loan = buffer.lend_range(f"store {transfer_id.hex()}", layout.payload_bytes(chunks))
        request.store_id = transfer_id
        request.source.CopyFrom(convert.target_to(buffer.target()))
        session = StoreSession(
            transfer_id=transfer_id,
            buffer=buffer,
            loan=loan,
            transport=self.transport,
            on_quiesced=lambda: self._transfers.pop(transfer_id, None),
            transfer_s=self._timeout_s,
            complete=request.source_complete,
            num_layers=layout.num_layers,
        )
        self._transfers[transfer_id] = session
        stop = Stop()
        await session.start(stream(self._stub.Store, request, timeout_s=self._timeout_s, stop=stop), stop)
        return session

    async def reach(self) -> None:
        """Make sure, once, that the data plane reaches the cluster, before a node receives an address here.

        UCX ends a process that is connected to by a peer to which it has no way back. To a cluster with tokens it is
        proved, too, that the address on the data plane is this process's own. Raises `PeerLost`, `NotAllowed`.
        """
        await self._reachability.check()
        if self._token:
            await self._own_address.prove()

    async def release(self, lookup: Lookup) -> bool:
        """Give the lease back; whether it was still valid. Raises `LeaseForged`, `Unavailable`, `DeadlineExceeded`."""
        if not lookup.lease:
            return False
        response = await call(self._stub.Release, pb.ReleaseRequest(lease=lookup.lease), timeout_s=self._timeout_s)
        return bool(response.released)

    async def evict(self, namespace: Namespace, keys: ChunkKeys, *, keep_chunks: int = 0) -> int:
        """Drop chunks from the end of a prefix, but for the first `keep_chunks`; how many were dropped.

        Those that a lease pins, or that other prefixes extend, stay. Raises `NotAllowed`, `Unavailable`,
        `DeadlineExceeded`.
        """
        about = convert.namespace_to(namespace)
        request = pb.EvictRequest(namespace=about, chunk_keys=packed(keys), keep_chunks=keep_chunks)
        return int((await call(self._stub.Evict, request, timeout_s=self._timeout_s)).evicted_chunks)

    async def demote(self, namespace: Namespace, keys: ChunkKeys, *, keep_chunks: int = 0) -> int:
        """Have nodes give up chunks that the object tier has, but for the first `keep_chunks`; they can still be read.

        Leases keep copies where they are; other prefixes and levels below `object` do not. Returns how many chunks the
        object tier has, and no node. Raises `NotAllowed`, `Unavailable`, `DeadlineExceeded`.
        """
        about = convert.namespace_to(namespace)
        request = pb.DemoteRequest(namespace=about, chunk_keys=packed(keys), keep_chunks=keep_chunks)
        return int((await call(self._stub.Demote, request, timeout_s=self._timeout_s)).demoted_chunks)

    async def assign(
        self, namespace: Namespace, keys: ChunkKeys, prompt_tokens: int, engines: Sequence[Engine]
    ) -> Assignment:
        """Choose the engine that is to prefill a prompt whose whole chunks have these keys. Raises `InvalidRequest`."""
        check_keys(keys)
        request = assign_request_to(namespace, keys, prompt_tokens, EngineTable.of(engines))
        return assignment_from(await call(self._stub.Assign, request, timeout_s=self._timeout_s))

    async def retain(self, namespace: Namespace, keys: ChunkKeys, seconds: float, *, holder: str = "") -> int:
        """Keep the longest stored prefix from being evicted for `seconds`; how many chunks it has.

        The retention outlives this client, and belongs to `holder`, for example a conversation; empty for the tenant.
        Calling again for the same prefix never shortens the time; a longer prefix has a retention of its own. Raises
        `InvalidRequest` for longer than the gateway allows, `NotAllowed`, `Unavailable`, `DeadlineExceeded`.
        """
        ttl_ms, about = max(1, math.ceil(seconds * 1000)), convert.namespace_to(namespace)
        request = pb.RetainRequest(namespace=about, chunk_keys=packed(keys), ttl_ms=ttl_ms, holder=holder)
        return int((await call(self._stub.Retain, request, timeout_s=self._timeout_s)).chunks)

    async def end_retention(self, namespace: Namespace, keys: ChunkKeys, *, holder: str = "") -> bool:
        """End a holder's retentions on any of the keys; whether there was one. Raises as `retain`."""
        request = pb.RetainRequest(namespace=convert.namespace_to(namespace), chunk_keys=packed(keys), holder=holder)
        return bool((await call(self._stub.Retain, request, timeout_s=self._timeout_s)).chunks)

    async def prefetch(self, namespace: Namespace, keys: ChunkKeys, *, within_s: float = 0.0) -> int:
        """Have the longest stored prefix brought into storage nodes' memory; returns how many chunks are there now.

        `within_s`: when they are wanted, seconds from now; of several prefetches the one that is due first is read
        first. At most half of a node's memory is filled; the rest stays where it is. Raises `NotAllowed`,
        `TooManyRequests`, `Unavailable`, `DeadlineExceeded`.
        """
        request = pb.PrefetchRequest(
            namespace=convert.namespace_to(namespace), chunk_keys=packed(keys), within_ms=round(within_s * 1000)
        )
        return int((await call(self._stub.Prefetch, request, timeout_s=self._timeout_s)).chunks_in_memory)

    async def status(self, *, with_away: bool = False) -> Sequence[Node]:
        """The members; `with_away`: and storage nodes that are expected, but not alive. Raises as `health`."""
        return await status.members(self._stub.Status, self._timeout_s, with_away=with_away)

    async def health(self) -> Sequence[Check]:
        """The checks that the cluster fails, the worst first. Raises `Unavailable`, `DeadlineExceeded`."""
        return await status.failed_checks(self._stub.Status, self._timeout_s)

    @property
    def gateway(self) -> GatewayServiceStub:
        """Stub of the gateway's methods, for code that is built on this client: it uses this client's connections."""
        return self._stub

    @property
    def timeout_s(self) -> float:
        """Deadline of one request."""
        return self._timeout_s

    def _on_message(self, raw: bytes) -> None:
        message = decode_message(raw)
        if isinstance(message, AddressNonce):
            self._own_address.on_nonce(message.half)
            return
        transfer = self._transfers.get(message.transfer_id)
        if transfer is not None:
            transfer.on_message(message)
