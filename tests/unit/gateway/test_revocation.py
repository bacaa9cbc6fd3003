"""Access keys that are deleted, rotated or restricted while requests and sessions of them run."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from functools import partial

import grpc
import pytest

from quire.model.errors import Unauthenticated
from quire.testing import FakeClock
from quire.wire.v1 import gateway_pb2 as pb
from quire_gateway.access.revocation import Revocations
from quire_server.redis.keys.access import AccessGrant, AccessKey, AccessLevel
from tests.polling import eventually
from tests.unit.gateway.rig import KeysInMemory, SessionGateway, lookup, serving, session_client, session_stream

GRANT = AccessGrant("bob", "bucket", "", AccessLevel.READ)
KEY = AccessKey("key", "alice", (GRANT,), rdma=True)
RESTRICTED = (None, replace(KEY, generation=2), replace(KEY, read_only=True), replace(KEY, rdma=False))
SAME = (KEY, replace(KEY, grants=(GRANT, AccessGrant("carol", "bucket", "", AccessLevel.WRITE))))


@pytest.mark.parametrize("current", [*RESTRICTED, replace(KEY, grants=()), replace(KEY, tenant="bob")])
async def test_all_uses_of_a_revoked_key_are_told(current: AccessKey | None) -> None:
    keys, clock, revoked = KeysInMemory(), FakeClock(), list[str]()
    keys.keys["key"] = KEY
    revocations = Revocations(keys, clock)
    running = asyncio.create_task(revocations.run())
    ends = [revocations.watch(KEY, partial(revoked.append, name)) for name in ("one", "two", "three")]
    await clock.advance(1)
    keys.down = True
    await clock.advance(10)
    assert not revoked, "while Redis is away nothing is revoked"
    keys.down = False
    keys.keys = {"key": current} if current is not None else {}
    ends.pop()()
    await clock.advance(0.6)
    await clock.advance(10)
    assert sorted(revoked) == ["one", "two"], "each is told once"
    for end in ends:
        end()
    assert not revocations._uses
    running.cancel()


@pytest.mark.parametrize("current", SAME)
async def test_what_a_key_still_allows_goes_on(current: AccessKey) -> None:
    keys = KeysInMemory()
    keys.keys["key"] = current
    revocations, revoked = Revocations(keys, FakeClock()), list[str]()
    revocations.watch(KEY, partial(revoked.append, "key"))
    revocations.watch(None, partial(revoked.append, "none"))
    await revocations.look()
    assert not revoked


async def test_an_unreadable_key_ends_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, revoked = KeysInMemory(), list[str]()
    revocations = Revocations(keys, FakeClock())
    revocations.watch(KEY, partial(revoked.append, "key"))
    revocations.watch(replace(KEY, name="other"), partial(revoked.append, "other"))
    read = keys.get

    async def get(name: str) -> AccessKey | None:
        if name == "key":
            raise ValueError("of a newer release")
        return await read(name)

    monkeypatch.setattr(keys, "get", get)
    await revocations.look()
    assert revoked == ["other"]


async def test_an_open_session_of_a_revoked_key_begins_nothing() -> None:
    """Finding S15: a deleted key worked for 89 seconds in a session. What runs is answered: nodes may be at memory of
    the client, which would take an error for the end of that.
    """
    gateway = SessionGateway()
    gateway.keys.keys["Bearer mallory"] = replace(KEY, name="Bearer mallory")
    async with serving(gateway) as port, session_client(port, "mallory") as stub:
        await lookup(stub, 1)
        running = asyncio.create_task(lookup(stub, 2, "slow"))
        await eventually(lambda: 2 in gateway.asked)
        gateway.keys.deleted.add("Bearer mallory")
        gateway.keys.keys.clear()
        await gateway.admission.revocations.look()
        with pytest.raises(Unauthenticated):
            await lookup(stub, 3)
        assert 3 not in gateway.asked and not running.done()
        gateway.gate.release()
        assert (await running).lease == b"2"
        with pytest.raises(Unauthenticated):
            await lookup(stub, 4)
        assert 4 not in gateway.asked


async def test_a_client_that_reads_nothing_is_refused_too() -> None:
    """The gateway cannot write to the client's stream, and still reads its requests."""
    gateway = SessionGateway()
    gateway.keys.keys["Bearer mallory"] = replace(KEY, name="Bearer mallory")
    async with serving(gateway) as port, session_stream(port, ("authorization", "Bearer mallory")) as silent:
        await silent.write(pb.SessionRequest(id=1, lookup=pb.LookupRequest(lease_ttl_ms=1)))
        await eventually(lambda: gateway.asked == [1])
        gateway.keys.keys.clear()
        await gateway.admission.revocations.look()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for number in range(2, 20):
                await silent.write(pb.SessionRequest(id=number, lookup=pb.LookupRequest(lease_ttl_ms=number)))
                await asyncio.sleep(0.01)
        assert gateway.asked == [1]


async def test_the_key_that_was_shown_last_counts() -> None:
    """A client renews its session with another key of its tenant."""
    gateway = SessionGateway(settings={"session_renew_ms": 100})
    for name in ("first", "second"):
        gateway.keys.keys[f"Bearer {name}"] = replace(KEY, name=f"Bearer {name}")
    gateway.keys.tenants = {"Bearer first": "t", "Bearer second": "t"}
    async with serving(gateway) as port, session_client(port, "first") as stub:
        await lookup(stub, 1)
        (session,) = gateway.sessions._sessions.values()
        assert session.stream is not None
        await gateway.sessions._renew(session, session.stream, "Bearer second")
        del gateway.keys.keys["Bearer first"]
        await gateway.admission.revocations.look()
        await lookup(stub, 2)
        await gateway.sessions._renew(session, session.stream, "Bearer second")
        del gateway.keys.keys["Bearer second"]
        await gateway.admission.revocations.look()
        assert session.refusal is not None
