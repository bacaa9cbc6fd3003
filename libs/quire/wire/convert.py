"""Between messages and Quire's value types. Messages go no further inwards than the module that calls this."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Final, TypeVar

from quire.model.choices import choice
from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.durability import Durability, OnExisting
from quire.model.errors import DescriptorInvalid, InvalidRequest, LayoutInvalid
from quire.model.events import CacheEvent, EventKind
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.layout import Attention, Dtype, KvLayout
from quire.model.nodes import (
    DecoderInfo,
    GatewayInfo,
    Info,
    KnownVae,
    Location,
    Node,
    NodeAddress,
    Removal,
    Role,
    RunningDelivery,
    SchedulerInfo,
    StorageInfo,
    StorageState,
)
from quire.model.object_part import ObjectSpeed
from quire.model.outcome import NodeOutcome
from quire.model.ranges import ChunkRange
from quire.model.records import NO_NAMESPACE
from quire.model.urgency import Urgency
from quire.transport.messages import TRANSFER_ID_BYTES
from quire.wire.v1 import common_pb2 as pb
from quire.wire.v1 import gateway_pb2, storage_pb2

_DTYPES: Final = {
    pb.DTYPE_FP32: Dtype.FP32,
    pb.DTYPE_FP16: Dtype.FP16,
    pb.DTYPE_BF16: Dtype.BF16,
    pb.DTYPE_FP8_E4M3: Dtype.FP8_E4M3,
    pb.DTYPE_FP8_E5M2: Dtype.FP8_E5M2,
}
_ATTENTION: Final = {pb.ATTENTION_KV_HEADS: Attention.KV_HEADS, pb.ATTENTION_MLA: Attention.MLA}
_ROLES: Final = {
    pb.ROLE_STORAGE: Role.STORAGE,
    pb.ROLE_DECODER: Role.DECODER,
    pb.ROLE_GATEWAY: Role.GATEWAY,
    pb.ROLE_SCHEDULER: Role.SCHEDULER,
}
_STORAGE_STATES: Final = {
    pb.STORAGE_STATE_ACTIVE: StorageState.ACTIVE,
    pb.STORAGE_STATE_DRAINING: StorageState.DRAINING,
    pb.STORAGE_STATE_DECOMMISSIONED: StorageState.DECOMMISSIONED,
}
_ORDERS: Final = {
    pb.DELIVERY_ORDER_AUTO: DeliveryOrder.AUTO,
    pb.DELIVERY_ORDER_LAYERWISE: DeliveryOrder.LAYERWISE,
    pb.DELIVERY_ORDER_CHUNKWISE: DeliveryOrder.CHUNKWISE,
}
_DURABILITY: Final = {
    pb.DURABILITY_MEMORY: Durability.MEMORY,
    pb.DURABILITY_LOCAL: Durability.LOCAL,
    pb.DURABILITY_REPLICATED: Durability.REPLICATED,
    pb.DURABILITY_OBJECT: Durability.OBJECT,
}
_ON_EXISTING: Final = {pb.ON_EXISTING_SKIP: OnExisting.SKIP, pb.ON_EXISTING_VERIFY: OnExisting.VERIFY}
_EVENT_KINDS: Final = {
    gateway_pb2.CACHE_EVENT_KIND_STORED: EventKind.STORED,
    gateway_pb2.CACHE_EVENT_KIND_REMOVED: EventKind.REMOVED,
    gateway_pb2.CACHE_EVENT_KIND_CLEARED: EventKind.CLEARED,
}

Message = TypeVar("Message")
Value = TypeVar("Value")


def inverse(table: dict[Message, Value], value: Value) -> Message:
    """Return the message of a value."""
    return next(message for message, meaning in table.items() if meaning is value)


def layout_from(message: pb.KvLayout) -> KvLayout:
    """Convert a layout. Raises `LayoutInvalid`."""
    if message.dtype not in _DTYPES:
        raise LayoutInvalid("not set, or unknown", field="layout.dtype")
    if message.attention not in _ATTENTION:
        raise LayoutInvalid("not set, or unknown", field="layout.attention")
    return KvLayout(
        message.num_layers,
        message.chunk_tokens,
        message.kv_heads,
        message.head_dim,
        _DTYPES[message.dtype],
        _ATTENTION[message.attention],
    )


def layout_to(layout: KvLayout) -> pb.KvLayout:
    return pb.KvLayout(
        num_layers=layout.num_layers,
        chunk_tokens=layout.chunk_tokens,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        dtype=inverse(_DTYPES, layout.dtype),
        attention=inverse(_ATTENTION, layout.attention),
    )


def namespace_from(message: pb.Namespace) -> Namespace:
    """Convert a namespace. Raises `LayoutInvalid`, `InvalidRequest`."""
    return Namespace(
        message.model_id,
        message.weight_version,
        layout=layout_from(message.layout),
        tenant_salt=message.tenant_salt,
        adapter=message.adapter,
        shard_index=message.shard_index,
        shard_count=message.shard_count or 1,
    )


def namespace_to(namespace: Namespace) -> pb.Namespace:
    return pb.Namespace(
        tenant_salt=namespace.tenant_salt,
        model_id=namespace.model_id,
        weight_version=namespace.weight_version,
        adapter=namespace.adapter,
        layout=layout_to(namespace.layout),
        shard_index=namespace.shard_index,
        shard_count=namespace.shard_count,
    )


def target_from(message: pb.RdmaTarget) -> RdmaTarget:
    return RdmaTarget(message.worker_address, message.address, message.length, message.remote_key, message.proof)


def target_to(target: RdmaTarget) -> pb.RdmaTarget:
    return pb.RdmaTarget(
        worker_address=target.worker_address,
        address=target.address,
        length=target.length,
        remote_key=target.remote_key,
        proof=target.proof,
    )


def order_to(order: DeliveryOrder) -> pb.DeliveryOrder:
    return inverse(_ORDERS, order)


def descriptor_from(message: pb.Descriptor, keys: ChunkKeys | None = None) -> Descriptor:
    """`keys`: those that it is of, where the message does not say them."""
    if message.order not in _ORDERS:
        raise DescriptorInvalid("not set, or unknown", field="descriptor.order")
    return Descriptor(
        keys if keys is not None else ChunkKeys(message.chunk_keys),
        message.num_layers,
        chunk_tokens=message.chunk_tokens,
        slice_bytes=message.per_layer_chunk_bytes,
        order=_ORDERS[message.order],
        target=target_from(message.target),
        first_chunk=message.first_chunk,
        chunk_count=message.chunk_count,
        layer_stride=message.layer_stride,
        chunk_offsets=message.chunk_offsets,
    )


def urgency_from(
    message: gateway_pb2.FetchRequest | gateway_pb2.RetrieveRequest | storage_pb2.DeliverRequest,
) -> Urgency:
    """Read when the layers of a delivery are needed. Raises `InvalidRequest`."""
    return Urgency(
        compute_window_us=message.compute_window_us,
        first_layer_us=message.first_layer_us,
        priority=message.priority,
    )


def descriptor_to(descriptor: Descriptor) -> pb.Descriptor:
    return pb.Descriptor(
        chunk_keys=descriptor.keys.packed,
        num_layers=descriptor.num_layers,
        chunk_tokens=descriptor.chunk_tokens,
        per_layer_chunk_bytes=descriptor.slice_bytes,
        order=order_to(descriptor.order),
        target=target_to(descriptor.target),
        first_chunk=descriptor.first_chunk,
        chunk_count=descriptor.chunk_count,
        layer_stride=descriptor.layer_stride,
        chunk_offsets=descriptor.chunk_offsets,
    )


def ranges_from(messages: Iterable[pb.ChunkRange]) -> tuple[ChunkRange, ...]:
    return tuple(ChunkRange(message.node_id, message.first_chunk, message.chunk_count) for message in messages)


def ranges_to(ranges: Iterable[ChunkRange]) -> list[pb.ChunkRange]:
    return [pb.ChunkRange(node_id=run.node_id, first_chunk=run.first, chunk_count=run.count) for run in ranges]


def object_speed_to(speed: ObjectSpeed) -> pb.ObjectSpeed:
    return pb.ObjectSpeed(
        latency_us=speed.latency_us, request_us=speed.request_us, bytes_per_s=max(1, speed.bytes_per_s)
    )


def object_speed_from(message: pb.ObjectSpeed) -> ObjectSpeed:
    return ObjectSpeed(message.latency_us, message.request_us, max(1, message.bytes_per_s))


def addresses_from(messages: Iterable[pb.NodeAddress]) -> tuple[NodeAddress, ...]:
    return tuple(
        NodeAddress(message.node_id, message.grpc_address, message.worker_address, message.protocol_version)
        for message in messages
    )


def addresses_to(addresses: Iterable[NodeAddress], *, grpc: bool) -> list[pb.NodeAddress]:
    """`grpc`: also of the nodes' gRPC servers, which clients have no business with."""
    return [
        pb.NodeAddress(
            node_id=address.node_id,
            grpc_address=address.grpc_address if grpc else "",
            worker_address=address.worker_address,
            protocol_version=address.protocol_version,
        )
        for address in addresses
    ]


def role_from(value: pb.Role) -> Role:
    """Convert a role. Raises `InvalidRequest`."""
    if value not in _ROLES:
        raise InvalidRequest("not set, or unknown", field="role")
    return _ROLES[value]


def state_from(value: pb.StorageState) -> StorageState:
    """Convert a storage node's state: active if it is not set, draining if this release does not know it."""
    return _STORAGE_STATES.get(value, StorageState.DRAINING) if value else StorageState.ACTIVE


def state_to(value: StorageState) -> pb.StorageState:
    return inverse(_STORAGE_STATES, value)


def removal_from(message: gateway_pb2.CheckRemovalResponse) -> Removal:
    return Removal(
        state_from(message.state),
        is_alive=message.alive,
        left_chunks=message.left_chunks,
        sole_chunks=message.sole_chunks,
        is_drained=message.drained,
        is_safe=message.safe,
        reason=message.reason,
    )


def removal_to(removal: Removal) -> gateway_pb2.CheckRemovalResponse:
    return gateway_pb2.CheckRemovalResponse(
        state=state_to(removal.state),
        alive=removal.is_alive,
        left_chunks=removal.left_chunks,
        sole_chunks=removal.sole_chunks,
        drained=removal.is_drained,
        safe=removal.is_safe,
        reason=removal.reason,
    )


def node_from(message: pb.Node) -> Node:
    """Convert a node's description. Raises `InvalidRequest` for one without a kind."""
    return Node(
        node_id=message.node_id,
        about=_info_from(message),
        grpc_address=message.grpc_address,
        incarnation=message.incarnation,
        protocol_version=message.protocol_version,
        location=Location(message.host, message.zone),
        stats=dict(message.stats),
        tenant_stats=dict(message.tenant_stats),
        notes=dict(message.notes),
        running=tuple(map(running_from, message.running)),
        state=state_from(message.state),
        is_away=message.away,
    )


def node_to(node: Node) -> pb.Node:
    message = pb.Node(
        node_id=node.node_id,
        grpc_address=node.grpc_address,
        incarnation=node.incarnation,
        protocol_version=node.protocol_version,
        host=node.location.host,
        zone=node.location.zone,
        stats=node.stats,
        tenant_stats=node.tenant_stats,
        notes=node.notes,
        running=map(running_to, node.running),
        state=state_to(node.state),
        away=node.is_away,
    )
    match node.about:
        case StorageInfo() as storage:
            message.storage.worker_address = storage.worker_address
            message.storage.capacity_bytes = storage.capacity_bytes
            message.storage.used_bytes = storage.used_bytes
            message.storage.link = storage.link
            message.storage.has_object_tier = storage.has_object_tier
            message.storage.reached = state_to(storage.reached)
            if storage.object_speed is not None:
                message.storage.object_speed.CopyFrom(object_speed_to(storage.object_speed))
        case DecoderInfo() as decoder:
            message.decoder.build = decoder.build
            message.decoder.capacity_bytes = decoder.capacity_bytes
            message.decoder.used_bytes = decoder.used_bytes
            message.decoder.signer = decoder.signer
            message.decoder.queued = decoder.queued
            message.decoder.devices = decoder.devices
            message.decoder.vaes.extend(pb.KnownVae(**asdict(vae)) for vae in decoder.vaes)
        case GatewayInfo():
            message.gateway.SetInParent()
        case SchedulerInfo() as scheduler:
            message.scheduler.SetInParent()
            for link, rate in scheduler.link_rates.items():
                message.scheduler.links.add(link=link, bytes_per_s=rate)
    return message


def _info_from(message: pb.Node) -> Info:
    match message.WhichOneof("about"):
        case "storage":
            storage = message.storage
            return StorageInfo(
                worker_address=storage.worker_address,
                capacity_bytes=storage.capacity_bytes,
                used_bytes=storage.used_bytes,
                link=storage.link,
                has_object_tier=storage.has_object_tier,
                object_speed=object_speed_from(storage.object_speed) if storage.HasField("object_speed") else None,
                reached=_STORAGE_STATES.get(storage.reached, StorageState.ACTIVE),
            )
        case "decoder":
            decoder = message.decoder
            return DecoderInfo(
                build=decoder.build,
                capacity_bytes=decoder.capacity_bytes,
                used_bytes=decoder.used_bytes,
                vaes=tuple(map(_vae_from, decoder.vaes)),
                signer=decoder.signer,
                queued=decoder.queued,
                devices=max(1, decoder.devices),
            )
        case "gateway":
            return GatewayInfo()
        case "scheduler":
            return SchedulerInfo(link_rates={link.link: link.bytes_per_s for link in message.scheduler.links})
        case _:
            raise InvalidRequest("it has no kind", field="node.about")


def running_to(running: RunningDelivery) -> pb.RunningDelivery:
    return pb.RunningDelivery(**asdict(running))


def running_from(message: pb.RunningDelivery) -> RunningDelivery:
    return RunningDelivery(
        delivery_id=message.delivery_id,
        tenant=message.tenant,
        layers=message.layers,
        layers_sent=message.layers_sent,
        bytes_per_layer=message.bytes_per_layer,
        rate_bytes_per_s=message.rate_bytes_per_s,
        running_ms=message.running_ms,
    )


def _vae_from(message: pb.KnownVae) -> KnownVae:
    return KnownVae(
        weights_sha256=message.weights_sha256,
        name=message.name,
        class_name=message.class_name,
        channels=message.channels,
        scale=message.scale,
        scaling_factor=message.scaling_factor,
        shift_factor=message.shift_factor,
        latents_mean=tuple(message.latents_mean),
        latents_std=tuple(message.latents_std),
    )


def event_to(event: CacheEvent) -> gateway_pb2.CacheEvent:
    return gateway_pb2.CacheEvent(
        kind=inverse(_EVENT_KINDS, event.kind),
        holder=event.holder,
        chunk_keys=event.keys.packed,
        parent_keys=event.parents,
        at_ms=event.at_ms,
        namespace=event.namespace,
    )


def event_from(message: gateway_pb2.CacheEvent) -> CacheEvent:
    """Convert an event. Raises `InvalidRequest` for an unknown kind."""
    if message.kind not in _EVENT_KINDS:
        raise InvalidRequest(f"{message.kind} is no kind of event", field="kind")
    return CacheEvent(
        kind=_EVENT_KINDS[message.kind],
        holder=message.holder,
        keys=ChunkKeys(message.chunk_keys),
        parents=message.parent_keys,
        at_ms=message.at_ms,
        namespace=message.namespace or NO_NAMESPACE,
    )


def durability_from(value: pb.Durability) -> Durability:
    """Convert a durability. Raises `InvalidRequest`."""
    if value not in _DURABILITY:
        raise InvalidRequest("not set, or unknown", field="durability")
    return _DURABILITY[value]


def durability_to(value: Durability | str) -> pb.Durability:
    return inverse(_DURABILITY, choice(Durability, value, "durability"))


def on_existing_from(value: pb.OnExisting) -> OnExisting:
    return _ON_EXISTING.get(value, OnExisting.SKIP)


def on_existing_to(value: OnExisting | str) -> pb.OnExisting:
    return inverse(_ON_EXISTING, choice(OnExisting, value, "on_existing"))


def transfer_id_from(raw: bytes, field: str) -> bytes:
    """`field`: of the message, for the error. Raises `InvalidRequest`."""
    if len(raw) != TRANSFER_ID_BYTES:
        raise InvalidRequest(f"{len(raw)} bytes, {TRANSFER_ID_BYTES} are needed", field=field)
    return raw


def outcome_from(message: pb.NodeOutcome) -> NodeOutcome:
    return NodeOutcome(
        message.node_id,
        ranges_from(message.ranges),
        delivered=message.delivered,
        bytes_moved=message.bytes,
        order=_ORDERS.get(message.order, DeliveryOrder.AUTO),
        rate_bytes_per_s=message.rate_bytes_per_s,
        scheduled=message.scheduled,
        quiesced=message.quiesced,
        error_code=message.error_code,
        error_message=message.error_message,
    )


def outcome_to(outcome: NodeOutcome) -> pb.NodeOutcome:
    return pb.NodeOutcome(
        node_id=outcome.node_id,
        ranges=ranges_to(outcome.ranges),
        delivered=outcome.delivered,
        bytes=outcome.bytes_moved,
        order=order_to(outcome.order),
        rate_bytes_per_s=outcome.rate_bytes_per_s,
        scheduled=outcome.scheduled,
        quiesced=outcome.quiesced,
        error_code=outcome.error_code,
        error_message=outcome.error_message,
    )
