"""Values survive being messages, and messages that mean nothing are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.durability import Durability, OnExisting
from quire.model.errors import DescriptorInvalid, InvalidRequest, LayoutInvalid
from quire.model.events import CacheEvent, EventKind
from quire.model.fingerprints import PRINT_BYTES
from quire.model.fitting import Fit, Gravity
from quire.model.hashing import Namespace
from quire.model.images import ExpectedImage, ImageEntry, LeasedRecord, Rendering
from quire.model.keys import KEY_BYTES, ChunkKeys
from quire.model.layout import Attention, Dtype, KvLayout
from quire.model.nodes import (
    DecoderInfo,
    GatewayInfo,
    KnownVae,
    Location,
    Node,
    NodeAddress,
    Role,
    RunningDelivery,
    SchedulerInfo,
    StorageInfo,
)
from quire.model.outcome import NodeOutcome
from quire.model.policy import NamespacePolicy, PolicyList, TenantPolicy, TenantState
from quire.model.ranges import ChunkRange
from quire.model.records import ChunkRecord, ChunkRecords
from quire.model.transfers import PrefetchOrder
from quire.transport.messages import TRANSFER_ID_BYTES
from quire.wire import convert, convert_images, convert_records
from quire.wire.convert_transfers import prefetch_order_from, prefetch_order_to
from quire.wire.index_messages import held_from
from quire.wire.policies import policies_from, policies_to, policy_from, policy_to
from quire.wire.v1 import common_pb2, gateway_pb2, images_pb2, orchestrator_pb2
from quire.wire.v1 import storage_pb2 as pb

_u32 = st.integers(0, (1 << 32) - 1)
_u63 = st.integers(0, (1 << 63) - 1)
_digests = st.binary(min_size=32, max_size=32)
_names = st.text("abcdefghij-._0123456789", min_size=1, max_size=12)
_keys = st.lists(_digests, min_size=1, max_size=4, unique=True).map(lambda keys: ChunkKeys(b"".join(keys)))
_layouts = st.one_of(
    st.builds(
        KvLayout,
        st.integers(1, 96),
        st.sampled_from([1, 16, 256]),
        st.integers(1, 8),
        st.just(64),
        st.sampled_from(Dtype),
    ),
    st.builds(
        KvLayout,
        st.integers(1, 96),
        st.just(16),
        st.just(1),
        st.just(576),
        st.sampled_from(Dtype),
        st.just(Attention.MLA),
    ),
)
_namespaces = st.builds(
    Namespace,
    _names,
    st.text(max_size=8),
    _layouts,
    st.binary(max_size=32),
    st.text(max_size=8),
    st.just(1),
    st.just(2),
)
_targets = st.builds(
    RdmaTarget,
    st.binary(min_size=1, max_size=64),
    st.integers(1, 1 << 47),
    st.just(1 << 40),
    st.binary(min_size=1, max_size=64),
)
_descriptors = st.builds(
    Descriptor, _keys, st.integers(1, 8), st.just(16), st.integers(1, 1 << 16), st.sampled_from(DeliveryOrder), _targets
)
_ranges = st.builds(ChunkRange, _names, st.integers(0, 1000), st.integers(0, 1000))
_outcomes = st.builds(
    NodeOutcome,
    _names,
    st.lists(_ranges, max_size=3).map(tuple),
    st.binary(max_size=8),
    _u63,
    st.sampled_from(DeliveryOrder),
    _u63,
    st.booleans(),
    st.booleans(),
    _names,
    st.text(max_size=20),
)
_storage = st.builds(
    StorageInfo,
    worker_address=st.binary(max_size=64),
    capacity_bytes=_u63,
    used_bytes=_u63,
    link=st.text(max_size=8),
    has_object_tier=st.booleans(),
)
_vaes = st.builds(
    KnownVae,
    weights_sha256=st.text("0123456789abcdef", max_size=64),
    name=_names,
    class_name=_names,
    channels=st.integers(1, 64),
    scale=st.integers(1, 64),
    scaling_factor=st.floats(-4, 4, width=32),
    shift_factor=st.floats(-4, 4, width=32),
)
_decoders = st.builds(
    DecoderInfo,
    build=_names,
    capacity_bytes=_u63,
    used_bytes=_u63,
    vaes=st.lists(_vaes, max_size=2).map(tuple),
    signer=st.text(max_size=8),
)
_schedulers = st.builds(SchedulerInfo, link_rates=st.dictionaries(_names, _u63, max_size=3))
_floats = st.floats(allow_nan=False, allow_infinity=False)
_running = st.builds(
    RunningDelivery,
    delivery_id=st.binary(min_size=16, max_size=16),
    tenant=_names,
    layers=st.integers(1, 128),
    layers_sent=st.integers(0, 128),
    bytes_per_layer=_u63,
    rate_bytes_per_s=_u63,
    running_ms=st.integers(0, 1 << 31),
)
_nodes = st.builds(
    Node,
    node_id=_names.filter(lambda name: name[0].isalnum()),
    about=st.one_of(_storage, _decoders, _schedulers, st.just(GatewayInfo())),
    grpc_address=_names,
    incarnation=_names,
    protocol_version=st.integers(0, 9),
    location=st.builds(Location, st.text(max_size=8), st.text(max_size=8)),
    stats=st.dictionaries(_names, _floats, max_size=3),
    tenant_stats=st.dictionaries(_names, _floats, max_size=3),
    notes=st.dictionaries(_names, st.text(max_size=8), max_size=3),
    running=st.lists(_running, max_size=2).map(tuple),
)
_events = st.builds(
    CacheEvent, kind=st.sampled_from(EventKind), holder=_names, keys=_keys, parents=st.binary(max_size=64), at_ms=_u63
)
_tags = st.binary(min_size=16, max_size=16)
_heads = st.builds(ChunkRecord, _digests, st.just(b""), _digests, st.just(b""), _tags)
_records = st.lists(_heads | st.builds(ChunkRecord, *[_digests.filter(any)] * 4, _tags)).map(ChunkRecords.of)
_metadata = st.dictionaries(st.text("abc-", min_size=1, max_size=5), st.text(max_size=5), max_size=3)
_images = st.builds(
    ImageEntry,
    _names.filter(lambda name: name[0].isalnum()),
    _digests,
    st.integers(1, 1 << 20),
    _digests,
    _names,
    st.integers(1, 1 << 16),
    st.integers(1, 1 << 16),
    _u63,
    _u63,
    _metadata.map(lambda each: tuple(sorted(each.items()))),
    st.text(max_size=8),
)
_addresses = st.builds(NodeAddress, _names, _names, st.binary(max_size=32))
_renderings = st.builds(
    Rendering,
    st.sampled_from(["png", "jpeg", "webp"]),
    st.integers(0, 100),
    st.integers(0, 4096),
    st.integers(0, 4096),
    st.sampled_from(Fit),
    st.sampled_from(Gravity),
    st.booleans(),
)

_PAIRS: dict[str, tuple[Any, Callable[..., Any], Callable[..., Any]]] = {
    "layout": (_layouts, convert.layout_to, convert.layout_from),
    "namespace": (_namespaces, convert.namespace_to, convert.namespace_from),
    "target": (_targets, convert.target_to, convert.target_from),
    "descriptor": (_descriptors, convert.descriptor_to, convert.descriptor_from),
    "outcome": (_outcomes, convert.outcome_to, convert.outcome_from),
    "node": (_nodes, convert.node_to, convert.node_from),
    "event": (_events, convert.event_to, convert.event_from),
    "records": (
        _records,
        lambda records: orchestrator_pb2.CommitRequest(records=convert_records.records_to(records)),
        convert_records.records_from,
    ),
    "records of the release before": (
        _records,
        lambda records: orchestrator_pb2.CommitRequest(chunks=convert_records.messages_to(records)),
        convert_records.records_from,
    ),
    "image": (_images, convert_images.image_to, convert_images.image_from),
    "expected": (
        st.builds(ExpectedImage, st.booleans(), _digests),
        convert_images.expected_to,
        convert_images.expected_from,
    ),
    "rendering": (_renderings, convert_images.rendering_to, convert_images.rendering_from),
    "durability": (st.sampled_from(Durability), convert.durability_to, convert.durability_from),
    "on_existing": (st.sampled_from(OnExisting), convert.on_existing_to, convert.on_existing_from),
}


@pytest.mark.parametrize("name", _PAIRS)
def test_a_value_survives(name: str) -> None:
    values, to, back = _PAIRS[name]

    @given(values)
    def survives(value: object) -> None:
        message = to(value)
        read = (
            type(message).FromString(message.SerializeToString()) if hasattr(message, "SerializeToString") else message
        )
        assert back(read) == value

    survives()


@given(_addresses, st.binary(max_size=32))
def test_clients_are_not_told_where_nodes_are_reached_by_grpc(address: NodeAddress, lease: bytes) -> None:
    assert convert.addresses_from(convert.addresses_to([address], grpc=True)) == (address,)
    shown = replace(address, grpc_address="")
    assert convert_images.leased_record_from(
        convert_images.leased_record_to(LeasedRecord(lease, (address,)))
    ) == LeasedRecord(lease, (shown,))


def test_policies_survive() -> None:
    policy = NamespacePolicy(bytes(range(16)), 60, 1 << 40)
    tenant = TenantPolicy("a", 2.0, 1 << 30, 1 << 50)
    state = TenantState(policy=tenant, kept_bytes=7, namespaces=frozenset({bytes(16), b"n" * 16}))
    listed = PolicyList(namespaces=(policy,), tenants=(state,), storage_nodes=3)
    assert policy_from(policy_to(policy)) == policy
    assert policies_from(policies_to(listed)) == listed


def test_a_namespace_without_shards_has_one() -> None:
    message = convert.namespace_to(Namespace("llama", "1", KvLayout(2, 16, 1, 8, Dtype.FP16)))
    message.shard_count = 0
    assert convert.namespace_from(message).shard_count == 1


def test_defaults_of_a_rendering() -> None:
    assert convert_images.rendering_from(images_pb2.Rendering()) == Rendering()
    assert convert.on_existing_from(common_pb2.ON_EXISTING_UNSPECIFIED) is OnExisting.SKIP


_LAYOUT = convert.layout_to(KvLayout(2, 16, 1, 8, Dtype.FP16))


@pytest.mark.parametrize(
    ("made", "kind", "field"),
    [
        (lambda: convert.layout_from(common_pb2.KvLayout(num_layers=1)), LayoutInvalid, "layout.dtype"),
        (
            lambda: convert.layout_from(common_pb2.KvLayout(num_layers=1, dtype=common_pb2.DTYPE_BF16)),
            LayoutInvalid,
            "layout.attention",
        ),
        (lambda: convert.descriptor_from(common_pb2.Descriptor()), DescriptorInvalid, "descriptor.order"),
        (lambda: convert.role_from(common_pb2.ROLE_UNSPECIFIED), InvalidRequest, "role"),
        (lambda: convert.node_from(common_pb2.Node(node_id="a")), InvalidRequest, "node.about"),
        (lambda: convert.event_from(gateway_pb2.CacheEvent()), InvalidRequest, "kind"),
        (lambda: convert.durability_from(common_pb2.DURABILITY_UNSPECIFIED), InvalidRequest, "durability"),
        (lambda: convert.transfer_id_from(b"short", "transfer_id"), InvalidRequest, "transfer_id"),
        (lambda: held_from(bytes(PRINT_BYTES), b"", [1]), InvalidRequest, "fingerprints"),
        (lambda: held_from(bytes(PRINT_BYTES), bytes(PRINT_BYTES), []), InvalidRequest, "fingerprints"),
    ],
)
def test_what_means_nothing_is_refused(made: Callable[[], object], kind: type[Exception], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        made()
    assert isinstance(refused.value, kind)
    assert refused.value.field == field


def test_what_means_something_is_taken() -> None:
    assert convert.role_from(common_pb2.ROLE_STORAGE) is Role.STORAGE
    whole = bytes(TRANSFER_ID_BYTES)
    assert convert.transfer_id_from(whole, "transfer_id") == whole
    (held,) = held_from(b"f" * PRINT_BYTES, b"b" * PRINT_BYTES, [7])
    assert (held.fingerprint, held.bucket, held.generation) == (b"f" * PRINT_BYTES, b"b" * PRINT_BYTES, 7)


def test_a_prefetch_is_understood_by_nodes_of_the_release_before_and_from_its_gateways() -> None:
    """The release before knows a node's own keys alone, and nothing of the object tier."""
    keys = ChunkKeys(b"".join(bytes([at]) * KEY_BYTES for at in range(8)))
    ranges = (ChunkRange("a", 1, 2), ChunkRange("a", 6, 1))
    layout = KvLayout(2, 16, 8, 128, Dtype.BF16)
    order = PrefetchOrder(keys=keys, ranges=ranges, layout=layout, within_s=0.25, namespace=b"n" * 16)
    message = prefetch_order_to(order)
    own = ChunkKeys(message.chunk_keys)
    assert prefetch_order_from(message, "a") == order and list(own) == [record.key for record in order.records()]
    old = prefetch_order_from(pb.PrefetchChunksRequest(chunk_keys=own.packed, within_ms=250), "a")
    assert [record.key for record in old.records()] == list(own) and old.layout is None and old.within_s == 0.25
    message.ranges.add(node_id="a", first_chunk=7, chunk_count=2)
    with pytest.raises(InvalidRequest, match="a range leaves the 8 keys"):
        prefetch_order_from(message, "a")
