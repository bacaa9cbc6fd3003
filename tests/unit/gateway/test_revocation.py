"""Access keys that are deleted, rotated or restricted while requests and sessions of them run."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from quire.model.errors import Unauthenticated
from quire.testing import FakeClock
from quire_gateway.revocation import Revocations
from quire_server.redis.access import AccessKey, Grant, Level
from tests.unit.gateway.rig import KeysInMemory, SessionGateway, lookup, serving, session_client, until

GRANT = Grant("bob", "bucket", "", Level.READ)
KEY = AccessKey("key", "alice", (GRANT,), rdma=True)
RESTRICTED = (None, replace(KEY, generation=2), replace(KEY, read_only=True), replace(KEY, rdma=False))
SAME = (KEY, replace(KEY, grants=(GRANT, Grant("carol", "bucket", "", Level.WRITE))))


@pytest.mark.parametrize("current", [*RESTRICTED, replace(KEY, grants=()), replace(KEY, tenant="bob")])
async def test_a_running_request_ends(current: AccessKey | None) -> None:
    keys, clock = KeysInMemory(), FakeClock()
    keys.keys["key"] = KEY
    revocations = Revocations(keys, clock)
    watching = asyncio.create_task(revocations.watch())

    async def serve() -> None:
        with revocations.request(KEY):
            await asyncio.Event().wait()

    running = asyncio.create_task(serve())
    await clock.advance(1)
    keys.down = True
    await clock.advance(10)
    assert not running.done(), "while Redis is away nothing is revoked"
    keys.down = False
    keys.keys = {"key": current} if current is not None else {}
    await clock.advance(0.6)
    with pytest.raises(Unauthenticated, match="deleted, rotated or restricted"):
        await running
    watching.cancel()


@pytest.mark.parametrize("current", SAME)
async def test_what_a_key_still_allows_goes_on(current: AccessKey) -> None:
    keys = KeysInMemory()
    keys.keys["key"] = current
    revocations, revoked = Revocations(keys, FakeClock()), list[str]()
    with revocations.using(KEY, lambda: revoked.append("key")), revocations.using(None, lambda: revoked.append("none")):
        await revocations.look()
    assert not revoked
    keys.keys.clear()
    await revocations.look()
    assert not revoked, "it has ended"


async def test_a_request_that_its_client_cancels_is_cancelled() -> None:
    revocations = Revocations(KeysInMemory(), FakeClock())

    async def serve() -> None:
        with revocations.request(KEY):
            await asyncio.Event().wait()

    running = asyncio.create_task(serve())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_an_open_session_ends_and_cannot_be_taken_up_again() -> None:
    """Finding S15: a deleted key worked for 89 seconds in a session."""
    gateway = SessionGateway()
    gateway.keys.keys["Bearer mallory"] = replace(KEY, name="Bearer mallory")
    watching = asyncio.create_task(gateway.admission.revocations.watch())
    async with serving(gateway) as port, session_client(port, "mallory") as stub:
        await lookup(stub, 1)
        waiting = asyncio.create_task(lookup(stub, 2, "slow"))
        await until(lambda: 2 in gateway.asked)
        gateway.keys.deleted.add("Bearer mallory")
        gateway.keys.keys.clear()
        with pytest.raises(Unauthenticated):
            await waiting
        with pytest.raises(Unauthenticated):
            await lookup(stub, 3)
    watching.cancel()
