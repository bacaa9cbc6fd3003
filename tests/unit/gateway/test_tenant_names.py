"""Names of tenants by the digests under which members know them."""

from __future__ import annotations

import pytest
import redis.asyncio as redis

from quire.model.errors import MetadataUnavailable
from quire.model.hashing import tenant_name
from quire.testing.clock import FakeClock
from quire_gateway.access.tenant_names import TenantNames
from quire_server.redis import AccessKeys

_SECRETS = b"a" * 32, b"b" * 32


async def test_tenants_with_keys_have_names(redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are known by the salts of both secrets, and kept for ten seconds, or until Redis answers again."""
    keys, clock = AccessKeys(redis_client, *_SECRETS), FakeClock()
    names = TenantNames(keys, clock)
    await keys.create("alice", ())
    expected = {tenant_name(salt): "alice" for salt in keys.salts("alice")}
    assert await names.by_digest() == expected and len(expected) == 2
    await keys.create("bob", ())
    assert await names.by_digest() == expected
    await clock.advance(11)

    async def refuse() -> None:
        raise MetadataUnavailable("Redis is away")

    with monkeypatch.context() as patch:
        patch.setattr(keys, "all", refuse)
        assert await names.by_digest() == expected
    assert await names.by_digest() == expected, "Redis is not waited for each time"
    await clock.advance(11)
    assert set((await names.by_digest()).values()) == {"alice", "bob"}
