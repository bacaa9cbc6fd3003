"""Who may read a public bucket, and who pays for it."""

from __future__ import annotations

from typing import Any

import pytest

from quire.testing.buckets import MemoryBuckets
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.core.sigv4 import Request
from quire_gateway.s3 import public
from quire_gateway.s3.access import RESERVED
from quire_gateway.s3.call import Call
from quire_gateway.s3.public import PublicBuckets
from quire_server.redis.keys.access import AccessKey


def _call(name: str) -> Call:
    nothing: Any = None
    tenant, _, bucket = name.rpartition(":")
    signed = Request("GET", f"/{name}/key", "", [])
    return Call(http=nothing, signed=signed, bucket=bucket, key="key", query={}, request_id="", tenant=tenant)


async def _buckets(*names: str) -> MemoryBuckets:
    buckets = MemoryBuckets()
    for name in names:
        await buckets.create("alice", name, 0.0)
        assert await buckets.set("alice", name, public.SETTING, b"public-read")
    return buckets


async def test_the_operator_has_the_last_word() -> None:
    """A bucket that was public is not while the switch is off."""
    buckets = await _buckets("open")
    caller = await PublicBuckets(buckets, allowed=True).caller(_call("alice:open"))
    assert caller is not None and caller.key.read_only and caller.tenant_of("open") == "alice"
    with pytest.raises(S3Error, match="Access Denied"):
        await PublicBuckets(buckets, allowed=False).caller(_call("alice:open"))


@pytest.mark.parametrize("name", RESERVED)
async def test_chunks_and_latents_are_never_public(name: str) -> None:
    """Even if the setting was stored."""
    with pytest.raises(S3Error, match="Access Denied"):
        await PublicBuckets(await _buckets(name), allowed=True).caller(_call(f"alice:{name}"))


async def test_requests_of_strangers_are_not_the_owners() -> None:
    """They are counted under a name that no tenant can have: they use up no limit of the owner."""
    caller = await PublicBuckets(await _buckets("open"), allowed=True).caller(_call("alice:open"))
    assert caller is not None
    assert PublicBuckets.payer(caller.key).tenant == "anyone/alice"
    key = AccessKey("QKABC", "alice")
    assert PublicBuckets.payer(key) is key
    assert await PublicBuckets(await _buckets("open"), allowed=True).caller(_call("open")) is None
