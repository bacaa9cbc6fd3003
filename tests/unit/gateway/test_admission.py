"""Who may do what at the gateway, and when there is room: decided in one place for every frontend."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.model.errors import NotAllowed, Unauthenticated
from quire.model.hashing import tenant_name
from quire.testing import FakeClock
from quire.wire.credentials import AUTHORIZATION, authorization, operator_token
from quire_gateway.access.admission import Admission, Need, Principal
from quire_gateway.config import GatewayConfig
from quire_gateway.errors import GatewayLate, TenantExhausted
from quire_server.redis.keys.access import AccessKey

SECRET = "s" * 32
KEYS = {
    "writer": AccessKey("writer", "alice", generation=1, rdma=True),
    "reader": AccessKey("reader", "alice", generation=1, read_only=True),
}


class _Keys:
    """The `KeyRing` without Redis."""

    async def get(self, name: str) -> AccessKey | None:
        return KEYS.get(name)

    def secrets(self, key: AccessKey) -> list[str]:
        return [f"secret of {key.name}", f"secret that {key.name} had before"]

    def salts(self, tenant: str) -> tuple[bytes, ...]:
        return tenant.encode() * 2, tenant.encode() * 3


def _admission(clock: FakeClock | None = None, **settings: Any) -> Admission:
    config = GatewayConfig(cluster_secret=SECRET, **{"auth": "tokens", **settings})
    return Admission(config, cast(Any, _Keys()), clock or FakeClock())


async def _principal(name: str) -> Principal:
    return await _admission().authenticate(f"Bearer {name}:secret of {name}")


@pytest.mark.parametrize(
    "header", ["", "Bearer ", "Bearer writer:wrong", "Bearer unknown:secret of unknown", "Basic x"]
)
async def test_missing_or_invalid_credentials(header: str) -> None:
    with pytest.raises(Unauthenticated, match="credentials"):
        await _admission().authenticate(header)
    assert await _admission(auth="off").authenticate(header) == Principal()


@pytest.mark.parametrize("auth", ["tokens", "off"])
async def test_a_token_that_is_no_ascii_is_refused(auth: str) -> None:
    """As aiohttp hands on a byte that is no UTF-8; it ended in a stack trace."""
    with pytest.raises(Unauthenticated):
        await _admission(auth=auth).authenticate("Bearer a:\udcff")


async def test_what_goes_out_counts_once_it_is_known() -> None:
    admission, writer = _admission(tenant_bytes_max=100), await _principal("writer")
    with admission.admit(writer, Need()) as first:
        first.take(90)
        with admission.admit(writer, Need()) as second:
            with pytest.raises(TenantExhausted) as refused:
                second.take(20)
            assert refused.value.retry_after_s > 0
            second.take(10)
        assert admission.tenant_stats == {"tenant.alice.requests": 1, "tenant.alice.bytes": 90}
        first.take(1000)  # alone it may go, or it never could
    assert admission.tenant_stats == {}


async def test_what_a_key_may() -> None:
    admission, writer, reader = _admission(), await _principal("writer"), await _principal("reader")
    own, other = b"alicealice", b"bobbob"
    for need in (Need(write=True, salt=own, payload=5, memory=5), Need(tenant=tenant_name(own)), Need()):
        with admission.admit(writer, need):
            pass
    with admission.admit(reader, Need(salt=own)):
        pass
    refused = [
        (reader, Need(write=True), "only reads"),
        (reader, Need(memory=1), "names no memory"),
        (writer, Need(salt=other), "salt"),
        (writer, Need(salt=b""), "salt"),
        (writer, Need(tenant=tenant_name(other)), "lease"),
    ]
    for principal, need, why in refused:
        with pytest.raises(NotAllowed, match=why), admission.admit(principal, need):
            pass


def _shown(token: str) -> Any:
    """The context of a gRPC call with that token."""
    return SimpleNamespace(invocation_metadata=lambda: ((AUTHORIZATION, authorization(token)),))


async def test_operators_know_the_clusters_secret() -> None:
    admission = _admission(cluster_secret_also="t" * 32)
    for secret in (SECRET, "t" * 32):
        assert (await admission.operator(_shown(operator_token(secret)))).operator
    for token in ("", "writer:secret of writer", operator_token("u" * 32), "\xe9"):
        with pytest.raises(Unauthenticated, match="operators"):
            await admission.operator(_shown(token))


@pytest.mark.parametrize("auth", ["tokens", "off"])
async def test_the_operators_token_is_none_of_a_client(auth: str) -> None:
    """At the frontends of clients it opens nothing."""
    admission, header = _admission(auth=auth), authorization(operator_token(SECRET))
    if auth == "off":
        assert await admission.authenticate(header) == Principal()
        return
    with pytest.raises(Unauthenticated):
        await admission.authenticate(header)


async def test_a_tenant_has_one_set_of_limits_whatever_the_frontend() -> None:
    admission, alice = _admission(tenant_requests_max=2), await _principal("writer")
    with admission.admit(alice, Need()), admission.admit(await _principal("reader"), Need()):
        with pytest.raises(TenantExhausted) as refused, admission.admit(alice, Need()):
            pass
        assert refused.value.retry_after_s > 0
        with admission.admit(Principal(), Need()), admission.admit(Principal(tenant="bob"), Need()):
            pass
    with admission.admit(alice, Need()):
        pass
    assert admission.stats["shed"] == 1


class _LateClock(FakeClock):
    """Everything sleeps a second longer than it wanted."""

    async def sleep(self, seconds: float) -> None:
        self._now_s += seconds + 1.0
        await asyncio.sleep(0)


async def test_a_gateway_that_is_late_takes_no_bytes() -> None:
    admission = _admission(_LateClock(), late_max_ms=500)
    admission.start()
    for _ in range(5):
        await asyncio.sleep(0)
    with pytest.raises(GatewayLate), admission.admit(Principal(), Need(payload=1)):
        pass
    with admission.admit(Principal(), Need()):
        pass
    await admission.close()


async def test_while_one_secret_replaces_the_other_both_are_believed() -> None:
    admission = _admission(cluster_secret_also="t" * 32)
    for secret in ("secret of writer", "secret that writer had before"):
        principal = await admission.authenticate(authorization(f"writer:{secret}"))
        for times in (2, 3):
            with admission.admit(principal, Need(salt=principal.tenant.encode() * times)):
                pass
