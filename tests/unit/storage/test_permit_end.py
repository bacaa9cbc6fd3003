"""Nodes stop at a permit's end: nothing of a client's memory is touched after it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from quire.model.errors import DeadlineExceeded, LeaseExpired, TransferRunning
from quire.model.permit import PermitSigner
from quire.testing import FakeClock
from quire.wire.v1 import storage_pb2 as pb
from quire_server.access.permits import PermitChecker, permit
from quire_storage.config import StorageConfig
from quire_storage.ingest.stores import Stores


def _request(clock: FakeClock, permitted_ms: int) -> pb.DeliverRequest:
    request = pb.DeliverRequest(delivery_id=b"d" * 16)
    permit(PermitSigner(b"secret"), request, "tenant", clock.now_ms() + permitted_ms)
    return request


async def test_a_node_is_told_for_how_long_it_may_transfer() -> None:
    clock = FakeClock()
    checker, request = PermitChecker(PermitSigner(b"secret"), clock), _request(clock, 60_000)
    shown = pb.DeliverRequest.FromString(request.SerializeToString())
    await clock.advance(10.0)
    tenant, left_s = checker.check_transfer(request)
    assert tenant == "tenant" and left_s == pytest.approx(50.0)
    with pytest.raises(TransferRunning):
        checker.check_transfer(shown)
    late = _request(clock, 1000)
    await clock.advance(1.0)
    with pytest.raises(LeaseExpired):
        checker.check_transfer(late)


async def test_no_byte_is_read_after_the_end() -> None:
    """Space was waited for until then. `pull` would connect to the client first."""
    clock, none = FakeClock(), cast(Any, None)
    stores = Stores(
        config=StorageConfig(cluster_secret="s"),
        tiers=none,
        transport=none,
        region=none,
        replicator=none,
        produced=none,
        arrivals=none,
        threads=none,
        clock=clock,
    )
    call: Any = type("Call", (), {"until_s": clock.monotonic_s()})
    with pytest.raises(DeadlineExceeded, match="permit ended"):
        await stores._pull(call, none, none)
