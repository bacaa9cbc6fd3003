"""The chunk store, other decoders, and bytes between registered memory."""

from __future__ import annotations

import os
from collections.abc import Sequence

from quire.client.memory.remote_memory import PeerTransfers
from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.errors import ChunkMissing, NodeUnavailable
from quire.model.images import ImageEntry, LeasedRecord
from quire.model.lease import Lease, LeaseSigner
from quire.model.outcome import NodeOutcome
from quire.model.permit import PermitSigner
from quire.model.transfers import DeliverOrder
from quire.transport import Transport
from quire.wire import convert, convert_images
from quire.wire.channels import ChannelPool, call, stream
from quire.wire.convert_transfers import deliver_order_to
from quire.wire.v1 import common_pb2, decoder_pb2
from quire.wire.v1.decoder_pb2_grpc import DecoderServiceStub
from quire.wire.v1.storage_pb2_grpc import StorageServiceStub
from quire_decoder.ports import CachedForm
from quire_server.access.permits import permit
from quire_server.clock import Clock

_TIMEOUT_S = 10.0
_DELIVERY_TIMEOUT_S = 30.0


class StoredRecords:
    """The `RecordSource` port: one request to a storage node, which writes the bytes by UCX."""

    def __init__(
        self,
        *,
        channels: ChannelPool,
        transport: Transport,
        memory: PeerTransfers,
        secrets: Sequence[bytes],
        clock: Clock,
    ) -> None:
        self._channels = channels
        self._transport = transport
        self._memory = memory
        self._leases = LeaseSigner(*secrets)
        self._permits = PermitSigner(*secrets)
        self._clock = clock

    async def fetch(self, entry: ImageEntry, leased: LeasedRecord) -> bytes:
        if not leased.lease:
            raise ChunkMissing(f"the record of {entry.image_id!r} is not stored", field="id")
        lease, layout = self._leases.open(leased.lease), entry.namespace.layout
        lease.check_fresh(self._clock.now_ms())
        lease.check_keys(entry.keys)
        for node in leased.nodes:  # it is about to connect here: UCX needs a way back
            self._transport.connect(node.worker_address)
        with self._memory.room(layout.chunk_bytes) as (target, view):
            descriptor = Descriptor(
                keys=entry.keys,
                num_layers=layout.num_layers,
                chunk_tokens=layout.chunk_tokens,
                slice_bytes=layout.slice_bytes,
                order=DeliveryOrder.AUTO,
                target=target,
            )
            (await self._deliver(lease, descriptor)).check()
            return bytes(view[: entry.record_bytes])

    async def _deliver(self, lease: Lease, descriptor: Descriptor) -> NodeOutcome:
        """Read it from the one node that has it. This decoder is a member: it permits writes into its own memory."""
        delivery_id, ranges = os.urandom(16), tuple(lease.ranges)
        order = DeliverOrder(delivery_id=delivery_id, descriptor=descriptor, ranges=ranges, tenant=lease.tenant)
        request = deliver_order_to(order)
        permit(self._permits, request, lease.tenant.tenant, self._clock.now_ms() + round(_DELIVERY_TIMEOUT_S * 1000))
        address = lease.addresses[lease.ranges[0].node_id]
        stub: StorageServiceStub = self._channels.stub(StorageServiceStub, address)
        outcome = None
        async for event in stream(stub.Deliver, request, timeout_s=_DELIVERY_TIMEOUT_S):
            if event.HasField("outcome"):
                outcome = convert.outcome_from(event.outcome)
        if outcome is None:
            raise NodeUnavailable("a storage node ended a delivery without an outcome")
        return outcome


class GrpcOwners:
    """The `CacheOwner` port."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    async def read_cached(self, address: str, entry: ImageEntry, target: RdmaTarget) -> CachedForm | None:
        request = decoder_pb2.ReadCachedRequest(entry=convert_images.image_to(entry), target=convert.target_to(target))
        response = await call(self._stub(address).ReadCached, request, timeout_s=_TIMEOUT_S, again=False)
        return CachedForm(response.kind, response.length, response.build) if response.kind else None

    async def write_back(
        self,
        address: str,
        entry: ImageEntry,
        record: tuple[RdmaTarget, int] | None,
        image: tuple[RdmaTarget, int] | None,
        build: str = "",
    ) -> None:
        request = decoder_pb2.WriteBackRequest(
            entry=convert_images.image_to(entry),
            record=_target(record),
            record_length=record[1] if record else 0,
            image=_target(image),
            image_length=image[1] if image else 0,
            build=build,
        )
        await call(self._stub(address).WriteBack, request, timeout_s=_TIMEOUT_S, again=False)

    def _stub(self, address: str) -> DecoderServiceStub:
        stub: DecoderServiceStub = self._channels.stub(DecoderServiceStub, address)
        return stub


def _target(loan: tuple[RdmaTarget, int] | None) -> common_pb2.RdmaTarget | None:
    return convert.target_to(loan[0]) if loan else None
