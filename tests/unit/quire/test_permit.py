"""Permits hold for exactly one transfer, once."""

from __future__ import annotations

import hashlib
import hmac
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.model.errors import LeaseExpired, LeaseForged, TransferRunning
from quire.model.permit import PermitSigner
from quire.testing import FakeClock
from quire.wire.v1 import storage_pb2 as pb
from quire_server.access.permits import PermitChecker, member_permit, permit

SIGNER = PermitSigner(b"a secret")


def _request() -> pb.DeliverRequest:
    request = pb.DeliverRequest(lease=b"lease", delivery_id=bytes(16), node_index=1)
    request.descriptor.chunk_keys = os.urandom(96)
    request.descriptor.target.worker_address = b"worker"
    request.descriptor.target.address = 4096
    request.descriptor.target.length = 1 << 20
    request.descriptor.target.remote_key = b"key"
    permit(SIGNER, request, "honest", 10_000)
    return request


def _checker(now_ms: int = 0) -> PermitChecker:
    return PermitChecker(SIGNER, FakeClock(now_ms / 1000))


def test_what_was_signed_is_permitted_once() -> None:
    checker, request = _checker(), _request()
    again = pb.DeliverRequest()
    again.CopyFrom(request)
    assert checker.check(request) == "honest"
    with pytest.raises(TransferRunning, match="before"):
        checker.check(again)


def test_what_members_ask_of_each_other_may_come_twice() -> None:
    """A request whose answer was lost is sent again. It is permitted as what it is, and not as another message."""
    request = pb.DropRequest(chunk_keys=bytes(64), generations=[1, 2])
    member_permit(SIGNER, request, 0)
    shown, checker = request.permit, _checker(119_999)
    for _ in range(2):
        request.permit = shown
        assert checker.check(request, again=True) == ""
    request.permit = shown
    with pytest.raises(LeaseExpired):
        _checker(120_000).check(request, again=True)
    described = pb.DescribeRequest(chunk_keys=bytes(64))
    member_permit(SIGNER, described, 0)
    for other in (pb.PrefetchChunksRequest(), pb.DeleteObjectsRequest(), pb.DescribeRequest()):
        other.chunk_keys, other.permit = described.chunk_keys, described.permit
        if isinstance(other, pb.DescribeRequest):
            _checker().check(other, again=True)
        else:
            with pytest.raises(LeaseForged):
                _checker().check(other, again=True)


def test_until_it_expires() -> None:
    assert _checker(9_999).check(_request()) == "honest"
    with pytest.raises(LeaseExpired):
        _checker(10_000).check(_request())


@pytest.mark.parametrize("change", range(7))
def test_nothing_else_is(change: int) -> None:
    """Other keys, other memory, more of it, another worker, another delivery: none of it was signed."""
    request = _request()
    target = request.descriptor.target
    match change:
        case 0:
            request.descriptor.chunk_keys = request.descriptor.chunk_keys[:64]
        case 1:
            target.address += 4096
        case 2:
            target.length *= 2
        case 3:
            target.remote_key = b"kez"
        case 4:
            target.worker_address = b"workes"
        case 5:
            request.delivery_id = os.urandom(16)
        case 6:
            request.layers_in_stream = True
    with pytest.raises(LeaseForged):
        _checker().check(request)


@given(at=st.integers(0, 44), bit=st.integers(0, 7), cut=st.integers(0, 45))
def test_no_bit_of_it_may_change(at: int, bit: int, cut: int) -> None:
    for wrong in (0, 1, 2):
        request = _request()
        changed = bytearray(request.permit)
        changed[at] ^= 1 << bit
        request.permit = [bytes(changed), request.permit[:cut], request.permit + b"x"][wrong]
        with pytest.raises(LeaseForged):
            _checker().check(request)


def test_another_clusters_secret_is_worth_nothing() -> None:
    with pytest.raises(LeaseForged, match="no member of this cluster has signed this request") as refused:
        PermitSigner(b"another").verify(_request().permit, b"", 0)
    assert refused.value.field == "permit"


def test_members_of_another_release_sign_the_same_bytes() -> None:
    """HMAC-SHA256 over a tag, then tenant, expiry and the request's digest, each behind its length in 8 bytes."""
    expiry, digest = (10_000).to_bytes(8, "little"), hashlib.sha256(b"request").digest()
    signed = b"quire permit 3" + b"".join(len(part).to_bytes(8, "little") + part for part in (b"t", expiry, digest))
    permitted = hmac.digest(b"a secret", signed, "sha256") + expiry + b"t"
    assert SIGNER.sign("t", b"request", 10_000) == permitted
    assert PermitSigner(b"new", b"a secret").verify(permitted, b"request", 0) == ("t", 10_000)
    with pytest.raises(LeaseExpired, match="permitted too long ago") as refused:
        SIGNER.verify(permitted, b"request", 10_000)
    assert refused.value.field == "permit"


def test_a_tenant_whose_name_is_no_text_costs_nothing_but_its_name() -> None:
    expiry = (10_000).to_bytes(8, "little")
    permitted = SIGNER._mac(b"a secret", b"\xff", b"request", expiry) + expiry + b"\xff"
    assert SIGNER.verify(permitted, b"request", 0) == ("\ufffd", 10_000)
