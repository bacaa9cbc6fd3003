"""Descriptors, leases, messages, configuration, errors: what crosses process boundaries comes back the same."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.model import errors
from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.errors import (
    ConfigInvalid,
    DescriptorInvalid,
    InvalidRequest,
    KeysInvalid,
    LeaseExpired,
    LeaseForged,
    TargetInvalid,
)
from quire.model.fingerprints import PRINT_BYTES
from quire.model.index import DIGEST_MODULUS, listing_number, listing_total
from quire.model.keys import KEYS_MAX, ChunkKeys
from quire.model.lease import Lease, LeaseSigner
from quire.model.policy import TenantPolicy
from quire.model.ranges import ChunkRange, ranges_of
from quire.telemetry.trace import binary_context, from_binary
from quire.transport.messages import (
    LayerProduced,
    LayerReady,
    Message,
    Quiesced,
    decode_message,
    encode_message,
)
from quire.wire import convert
from quire.wire.status import status_of
from quire_server.config import load, setting

targets = st.builds(
    RdmaTarget,
    st.binary(min_size=1, max_size=300),
    st.integers(1, 1 << 47),
    st.integers(1 << 40, 1 << 41),
    st.binary(min_size=1, max_size=120),
)
descriptors = st.builds(
    Descriptor,
    st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=40, unique=True).map(b"".join).map(ChunkKeys),
    st.integers(1, 128),
    st.integers(1, 256),
    st.integers(1, 1 << 20),
    st.sampled_from(DeliveryOrder),
    targets,
)


@given(descriptors)
def test_descriptor_survives_header_and_proto(descriptor: Descriptor) -> None:
    """One value type in gRPC and in the S3 header."""
    assert Descriptor.from_header(descriptor.to_header()) == descriptor
    assert convert.descriptor_from(convert.descriptor_to(descriptor)) == descriptor


@given(descriptors, st.data())
def test_damaged_header_is_a_typed_error(descriptor: Descriptor, data: st.DataObject) -> None:
    """Whatever is cut off, the answer is an InvalidRequest and no other exception."""
    text = descriptor.to_header()
    cut = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(InvalidRequest):
        Descriptor.from_header(text[:cut])


@given(st.text(max_size=200))
def test_arbitrary_header_is_a_typed_error(text: str) -> None:
    with pytest.raises(InvalidRequest):
        Descriptor.from_header(text)


def test_descriptor_refuses_what_cannot_work() -> None:
    target = RdmaTarget(b"w", 4096, 1000, b"k")
    with pytest.raises(TargetInvalid, match=r"target\.length"):
        Descriptor(ChunkKeys(bytes(range(64))), 4, 16, 512, DeliveryOrder.AUTO, target)
    with pytest.raises(DescriptorInvalid, match="chunk_keys"):
        Descriptor(ChunkKeys(b""), 4, 16, 512, DeliveryOrder.AUTO, target)
    with pytest.raises(TargetInvalid, match="target"):
        RdmaTarget(b"w", (1 << 64) - 10, 100, b"k")
    with pytest.raises(TargetInvalid, match="remote_key"):
        RdmaTarget(b"w", 4096, 100, b"")


def test_lease_is_bound_to_its_chunks_node_time_and_secret() -> None:
    """A lease says what it is over; altered, expired, or of another cluster it is refused."""
    keys = ChunkKeys(bytes(range(64)))
    lease = Lease(
        lease_id=b"i" * 16,
        tip=keys.at(1),
        tip_bucket=keys.at(0),
        expires_ms=1000,
        ranges=(ChunkRange("a", 0, 1), ChunkRange("b", 1, 1)),
        keys_digest=keys.digest(),
        addresses={"a": "a:1", "b": "b:1"},
        tenant=TenantPolicy("t", 2.0, 7),
    )
    signer = LeaseSigner(b"secret")
    token = signer.sign(lease)
    assert signer.open(token) == lease
    lease.check_fresh(999)
    lease.check_keys(keys)
    with pytest.raises(LeaseForged, match="keys"):
        lease.check_keys(keys.run(0, 1))
    with pytest.raises(LeaseForged, match="keys"):
        lease.check_keys(ChunkKeys(keys.at(0) + bytes(32)))
    of_sample = replace(lease, keys_digest=b"")
    for accepted_keys in (keys, ChunkKeys(bytes(32) + keys.at(1))):  # a last key commits to those before
        of_sample.check_keys(accepted_keys)
    with pytest.raises(LeaseForged, match="keys"):
        of_sample.check_keys(ChunkKeys(keys.at(0) + bytes(32)))
    with pytest.raises(LeaseForged, match="keys"):
        lease.check_keys(ChunkKeys(bytes(32) + keys.at(1)))
    with pytest.raises(LeaseExpired):
        lease.check_fresh(1000)
    with pytest.raises(LeaseForged):
        LeaseSigner(b"other").open(token)
    for position in range(0, len(token), 7):
        with pytest.raises(LeaseForged):
            signer.open(token[:position] + bytes([token[position] ^ 1]) + token[position + 1 :])
    with pytest.raises(LeaseForged):
        signer.open(b"")


transfers = st.binary(min_size=16, max_size=16)
traces = st.binary(min_size=25, max_size=25)


@given(
    st.one_of(
        st.builds(LayerReady, transfers, st.integers(0, 65535), st.integers(0, 65535), traces),
        st.builds(Quiesced, transfers, st.integers(0, 65535), st.integers(0, KEYS_MAX), traces),
        st.builds(LayerProduced, transfers, st.integers(0, 65535), traces),
    )
)
def test_messages_come_back(message: Message) -> None:
    assert decode_message(encode_message(message)) == message


@pytest.mark.parametrize("status", [0, 1])
def test_a_node_of_the_release_before_reports_no_number_of_chunks(status: int) -> None:
    """Such a node reports 1 for a transfer that did not fail, also where none of the chunks was kept."""
    raw = bytearray(encode_message(Quiesced(b"t" * 16, 3, 0)))
    raw[22:24] = status.to_bytes(2, "little")
    assert decode_message(bytes(raw)) == Quiesced(b"t" * 16, 3, 0)


@given(st.binary(max_size=80))
def test_unknown_messages_are_typed_errors(raw: bytes) -> None:
    try:
        decode_message(raw)
    except InvalidRequest:
        return
    assert raw[0] == 1


def test_trace_context_fits_the_message() -> None:
    assert len(binary_context()) == 25
    assert not from_binary(bytes(25)).is_valid


def test_every_error_has_a_code_of_its_own_and_a_status() -> None:
    """Names are unique, and each maps to a status other than the catch-all except InternalError.

    An error of one service travels as the nearest one that all of them know.
    """
    kinds, pending = [], [errors.QuireError]
    while pending:
        kind = pending.pop()
        kinds.append(kind)
        pending.extend(kind.__subclasses__())
    common = [kind for kind in kinds if kind.__module__ == "quire.model.errors"]
    assert len({kind.code() for kind in common}) == len(common)
    assert all(issubclass(kind, errors.by_code(kind.code())) for kind in kinds)
    internal = {kind.code() for kind in kinds if status_of(kind("x")).name == "INTERNAL"}
    assert internal == {kind.code() for kind in kinds if issubclass(kind, errors.InternalError)} | {"QuireError"}
    assert all(errors.by_code(kind.code()) is kind for kind in common)


@dataclass(frozen=True, slots=True)
class _Sample:
    listen: str = setting("x", "address")
    limit_bytes: int = setting(5, "limit", minimum=1)
    share: float = setting(0.5, "share")
    shared: str = setting("", "secret", variable="QUIRE_SHARED_MEMORY")


def test_configuration_reports_every_problem_at_once() -> None:
    loaded = load(_Sample, "Q_", {"Q_LIMIT_BYTES": "7_000", "QUIRE_SHARED_MEMORY": "s"})
    assert loaded == _Sample("x", 7000, 0.5, "s")
    with pytest.raises(ConfigInvalid) as raised:
        load(_Sample, "Q_", {"Q_LIMIT_BYTES": "0", "Q_SHARE": "many"})
    assert "Q_LIMIT_BYTES" in str(raised.value) and "Q_SHARE" in str(raised.value)


@pytest.mark.parametrize("numbers", [[0, 0], [0, 1, 0]])
def test_a_request_names_each_key_once(numbers: list[int]) -> None:
    """Finding 14: every occurrence of a repeated key was pinned, and only one of them let go."""
    with pytest.raises(KeysInvalid, match="twice"):
        ChunkKeys(b"".join(bytes([number]) * 32 for number in numbers)).distinct()
    assert len(ChunkKeys(b"".join(bytes([number]) * 32 for number in range(9))).distinct()) == 9


def test_keys_that_begin_alike_are_distinct() -> None:
    """Eight equal bytes at the start are no repetition."""
    assert len(ChunkKeys(bytes(32) + bytes(31) + b"\1").distinct()) == 2


@given(st.sets(st.integers(0, 30)))
def test_positions_are_ranges(positions: set[int]) -> None:
    ranges = ranges_of("a", sorted(positions))
    assert [at for run in ranges for at in range(run.first, run.stop)] == sorted(positions)
    assert all(run.stop < following.first for run, following in itertools.pairwise(ranges)), "none can be longer"
    assert {run.node_id for run in ranges} <= {"a"}


@given(st.lists(st.tuples(st.binary(min_size=PRINT_BYTES, max_size=PRINT_BYTES), st.integers(0, (1 << 64) - 1))))
def test_the_total_of_a_listing_is_that_of_its_numbers(listed: list[tuple[bytes, int]]) -> None:
    packed, generations = b"".join(print_ for print_, _ in listed), [generation for _, generation in listed]
    assert listing_total(packed, generations) == sum(listing_number(*chunk) for chunk in listed) % DIGEST_MODULUS


def test_the_total_of_the_largest_listing() -> None:
    """65,537 numbers of 48 bits are more than 64 bits hold."""
    count, number = (1 << 16) + 1, (1 << 48) - 1
    assert listing_total(b"\xff" * PRINT_BYTES * count, [0] * count) == count * number % DIGEST_MODULUS
