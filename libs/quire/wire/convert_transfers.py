"""Conversion between orders to storage nodes and messages."""

from __future__ import annotations

import math

from quire.model.errors import InvalidRequest
from quire.model.keys import ChunkKeys
from quire.model.policy import NAMESPACE_TAG_BYTES, TenantPolicy
from quire.model.ranges import ChunkRange
from quire.model.records import NO_NAMESPACE
from quire.model.transfers import DeliverOrder, IngestOrder, PrefetchOrder
from quire.wire import convert
from quire.wire.convert_records import COLUMNS_FROM, messages_to, records_from, records_to
from quire.wire.v1 import storage_pb2 as pb


def deliver_order_to(order: DeliverOrder) -> pb.DeliverRequest:
    """Return the message, without a permit: tenant and end are the permit's."""
    return pb.DeliverRequest(
        delivery_id=order.delivery_id,
        descriptor=convert.descriptor_to(order.descriptor),
        ranges=convert.ranges_to(order.ranges),
        node_index=order.node_index,
        compute_window_us=order.urgency.compute_window_us,
        first_layer_us=order.urgency.first_layer_us,
        priority=order.urgency.priority,
        layers_in_stream=order.layers_in_stream,
        tenant_weight=order.tenant.weight,
        tenant_cap_bytes_per_s=order.tenant.cap_bytes_per_s,
        unchained=order.unchained,
        namespace=b"" if order.namespace == NO_NAMESPACE else order.namespace,
        arriving=convert.ranges_to(order.arriving),
        follow_ms=round(order.follow_s * 1000),
    )


def deliver_order_from(message: pb.DeliverRequest, tenant: str = "", until_s: float = math.inf) -> DeliverOrder:
    """Check and convert a message.

    Args:
        message: The request.
        tenant: Of its permit.
        until_s: End of its permit, on this node's monotonic clock.

    Raises:
        InvalidRequest: A part is invalid.
    """
    return DeliverOrder(
        delivery_id=convert.transfer_id_from(message.delivery_id, "delivery_id"),
        descriptor=convert.descriptor_from(message.descriptor),
        ranges=convert.ranges_from(message.ranges),
        node_index=message.node_index,
        urgency=convert.urgency_from(message),
        layers_in_stream=message.layers_in_stream,
        tenant=TenantPolicy(tenant, message.tenant_weight, message.tenant_cap_bytes_per_s),
        unchained=message.unchained,
        namespace=message.namespace or NO_NAMESPACE,
        arriving=convert.ranges_from(message.arriving),
        follow_s=message.follow_ms / 1000,
        until_s=until_s,
    )


def prefetch_order_to(order: PrefetchOrder) -> pb.PrefetchChunksRequest:
    """Return the message, without a permit."""
    return pb.PrefetchChunksRequest(
        chunk_keys=b"".join(order.keys.run(run.first, run.count).packed for run in order.ranges),
        prefix_keys=order.keys.packed,
        within_ms=round(order.within_s * 1000),
        ranges=convert.ranges_to(order.ranges),
        layout=convert.layout_to(order.layout) if order.layout is not None else None,
        namespace=b"" if order.namespace == NO_NAMESPACE else order.namespace,
    )


def prefetch_order_from(message: pb.PrefetchChunksRequest, node_id: str) -> PrefetchOrder:
    """Check and convert a message, which of a gateway of the release before has the node's own keys alone.

    Raises `InvalidRequest`.
    """
    keys, ranges = ChunkKeys(message.prefix_keys or message.chunk_keys), convert.ranges_from(message.ranges)
    if not message.prefix_keys:
        return PrefetchOrder(keys=keys, ranges=(ChunkRange(node_id, 0, len(keys)),), within_s=message.within_ms / 1000)
    if any(run.stop > len(keys) for run in ranges):
        raise InvalidRequest(f"a range leaves the {len(keys)} keys", field="ranges")
    return PrefetchOrder(
        keys=keys,
        ranges=ranges,
        layout=convert.layout_from(message.layout),
        within_s=message.within_ms / 1000,
        namespace=message.namespace or NO_NAMESPACE,
    )


def ingest_order_to(order: IngestOrder, protocol: int) -> pb.IngestRequest:
    """Return the message, without a permit: tenant and end are the permit's. `protocol`: what the node speaks."""
    has_columns = protocol >= COLUMNS_FROM
    return pb.IngestRequest(
        layout=convert.layout_to(order.layout),
        namespace_digest=order.namespace_digest,
        records=records_to(order.records) if has_columns else None,
        chunks=() if has_columns else messages_to(order.records),
        store_id=order.store_id,
        source=convert.target_to(order.source),
        source_ranges=convert.ranges_to(order.source_ranges),
        source_chunk_count=order.source_chunks,
        node_index=order.node_index,
        durability=convert.durability_to(order.durability),
        on_existing=convert.on_existing_to(order.on_existing),
        source_complete=order.source_complete,
    )


def ingest_order_from(message: pb.IngestRequest, tenant: str = "", until_s: float = math.inf) -> IngestOrder:
    """Check and convert a message.

    Args:
        message: The request.
        tenant: Of its permit.
        until_s: End of its permit, on this node's monotonic clock.

    Raises:
        InvalidRequest: A part is invalid.
        TargetInvalid: The source is smaller than its chunks.
    """
    return IngestOrder(
        layout=convert.layout_from(message.layout),
        namespace_digest=message.namespace_digest,
        records=records_from(message, message.namespace_digest[:NAMESPACE_TAG_BYTES].ljust(NAMESPACE_TAG_BYTES, b"\0")),
        store_id=convert.transfer_id_from(message.store_id, "store_id"),
        source=convert.target_from(message.source),
        source_ranges=convert.ranges_from(message.source_ranges),
        source_chunks=message.source_chunk_count,
        node_index=message.node_index,
        durability=convert.durability_from(message.durability),
        on_existing=convert.on_existing_from(message.on_existing),
        source_complete=message.source_complete,
        tenant=tenant,
        until_s=until_s,
    )
