"""Clients' sessions over real gRPC: what they own, what ends with them, and what a broken connection costs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest

from quire.model.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MetadataUnavailable,
    NodeUnavailable,
    QuireError,
    TooManyRequests,
    Unauthenticated,
)
from quire.wire.channels import Stop, call, stream
from quire.wire.session import NAME_HEADER, _failure
from quire.wire.status import error_of
from quire.wire.v1 import gateway_pb2 as pb
from quire.wire.v1.gateway_pb2_grpc import (
    GatewayServiceStub,
    add_GatewayServiceServicer_to_server,
)
from quire_gateway.access.admission import Principal
from quire_gateway.grpc import session as session_module
from quire_gateway.grpc import sessions
from quire_gateway.grpc.session import Session
from quire_server.grpc_server import Server
from tests.polling import eventually
from tests.unit.gateway.rig import (
    SessionGateway,
    Wire,
    fetch,
    lookup,
    serving,
    session_client,
    session_stream,
)


async def test_many_requests_share_a_stream_and_fail_by_themselves() -> None:
    gateway = SessionGateway()
    async with serving(gateway) as port, session_client(port) as stub:
        answers = await asyncio.gather(*(lookup(stub, ttl) for ttl in range(1, 40)))
        assert [answer.lease for answer in answers] == [b"%d" % ttl for ttl in range(1, 40)]
        with pytest.raises(InvalidRequest, match="host: not so") as bad:
            await lookup(stub, 1, "bad")
        assert bad.value.answered and bad.value.field == "host"
        with pytest.raises(DeadlineExceeded):
            await lookup(stub, 1, "slow", timeout_s=0.05)
        await eventually(lambda: gateway.stopped)
        assert gateway.stopped == ["lookup"] and gateway.sessions.stats == {"sessions": 1}


async def test_what_a_client_has_ends_with_it_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its leases, but for those that it gave back, and what it has running."""
    monkeypatch.setattr("quire.wire.session._CLOSE_S", 30.0)
    gateway = SessionGateway(settings={"session_grace_ms": 60_000})
    async with serving(gateway) as port:
        async with session_client(port) as stub:
            for ttl in (1, 2, 3):
                await lookup(stub, ttl)
            await call(stub.Lookup, pb.LookupRequest(lease_ttl_ms=4, other_shards=[pb.ShardKeys()]), timeout_s=5)
            await call(stub.Release, pb.ReleaseRequest(lease=b"2"), timeout_s=5)
            gateway.gate.release()
            events = fetch(stub, 5)
            assert (await anext(aiter(events))).layer.layer == 0
            slow = asyncio.create_task(lookup(stub, 9, "slow"))
            await eventually(lambda: 9 in gateway.asked)
        with pytest.raises(QuireError):
            await slow
        await eventually(lambda: len(gateway.released) == 4)
        assert sorted(gateway.released) == [b"1", b"3", b"4", b"4 of shard 0"]
        assert sorted(gateway.stopped) == ["fetch", "lookup"]
        assert gateway.sessions.stats == {"sessions": 0}


async def test_a_request_that_is_given_up_is_stopped() -> None:
    gateway = SessionGateway()
    async with serving(gateway) as port, session_client(port) as stub:
        events = fetch(stub, 5)
        gateway.gate.release()
        await anext(aiter(events))
        await events.aclose()  # type: ignore[attr-defined]
        await eventually(lambda: gateway.stopped)
        assert gateway.stopped == ["fetch"]


async def test_a_request_that_is_stopped_is_answered_with_the_nodes_that_may_go_on() -> None:
    """Not with one that has said its end, nor with one that was not asked."""
    gateway, stop = SessionGateway(), Stop()
    async with serving(gateway) as port, session_client(port) as stub:
        events = aiter(fetch(stub, 5, nodes=3, stop=stop))
        gateway.gate.release()
        assert (await anext(events)).layer.layer == 0
        stop.now()
        answer = await anext(events)
        assert isinstance(answer, pb.SessionStopped) and list(answer.nodes) == ["storage-1", "storage-2"]
        assert [event async for event in events] == [] and gateway.stopped == ["fetch"]


async def test_a_request_that_is_stopped_survives_a_stream_that_breaks() -> None:
    gateway, stop = SessionGateway(settings={"session_grace_ms": 60_000}), Stop()
    async with serving(gateway) as port, Wire(port) as wire, session_client(wire.port) as stub:
        events = aiter(fetch(stub, 5, nodes=1, stop=stop))
        gateway.gate.release()
        await anext(events)
        wire.cut()
        stop.now()
        assert list((await anext(events)).nodes) == []
        await eventually(lambda: gateway.stopped == ["fetch"])


async def test_a_request_that_was_not_sent_has_asked_nobody() -> None:
    gateway, stop = SessionGateway(), Stop()
    async with serving(gateway) as port, Wire(port) as wire, session_client(wire.port) as stub:
        await lookup(stub, 1)
        wire.flowing.clear()
        large = pb.FetchRequest(lease=bytes(8 << 20))  # more than the connection takes
        filling = asyncio.create_task(_first(stream(stub.Fetch, large, timeout_s=30)))
        await asyncio.sleep(0.05)
        first_answer = asyncio.create_task(_first(fetch(stub, 5, nodes=3, stop=stop)))
        await asyncio.sleep(0.05)
        stop.now()
        answer = await first_answer
        assert isinstance(answer, pb.SessionStopped) and not answer.nodes
        wire.flowing.set()
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)


async def test_a_request_that_no_gateway_took_is_asked_of_no_other_once_it_is_stopped() -> None:
    first, second, stop = SessionGateway(), SessionGateway(), Stop()
    async with (
        serving(second) as port_2,
        serving(first) as port_1,
        session_client(f"127.0.0.1:{port_1},127.0.0.1:{port_2}") as stub,
    ):
        await lookup(stub, 1)
        (session,) = first.sessions._sessions.values()
        session.take = lambda message: None  # type: ignore[method-assign]
        first_answer = asyncio.create_task(_first(fetch(stub, 5, nodes=3, stop=stop)))
        await asyncio.sleep(0.05)
        stop.now()
        first.sessions.leave()
        answer = await first_answer
        assert isinstance(answer, pb.SessionStopped) and not answer.nodes
        assert second.sessions.stats == {"sessions": 0}


async def test_a_request_that_ends_with_its_time_was_not_answered() -> None:
    """Told so as an answer, a client would take it for refused before any node was asked, and use its memory again."""
    gateway = SessionGateway()
    async with serving(gateway) as port, session_stream(port) as late:
        await late.read()
        await late.write(pb.SessionRequest(id=1, timeout_ms=50, fetch=pb.FetchRequest(compute_window_us=5)))
        failed = _failure((await late.read()).error)
        assert failed.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        error = error_of(failed)
        assert isinstance(error, DeadlineExceeded) and not error.answered
        assert gateway.stopped == ["fetch"]


async def test_a_connection_that_breaks_costs_no_answer() -> None:
    """Events that came while the client was away are there when it is back, once each and in order."""
    gateway = SessionGateway(settings={"session_grace_ms": 10_000})
    async with serving(gateway) as port, Wire(port) as wire, session_client(wire.port) as stub:
        events = fetch(stub, 200)
        coming = aiter(events)
        gateway.gate.release()
        seen = [(await anext(coming)).layer.layer]
        for _ in range(5):
            for _ in range(20):
                gateway.gate.release()
            wire.cut()
            seen.append((await anext(coming)).layer.layer)
            assert (await lookup(stub, 7)).lease == b"7"
        for _ in range(200):
            gateway.gate.release()
        seen += [event.layer.layer async for event in coming]
        assert seen == list(range(200))
        assert gateway.stopped == ["fetch"] and not gateway.released
        assert gateway.sessions.stats == {"sessions": 1}


async def test_a_request_that_is_given_up_while_it_is_sent_costs_itself_only() -> None:
    """A write that is cancelled ends its stream: so none is, whatever has given up waiting for it."""
    gateway = SessionGateway()
    async with serving(gateway) as port, Wire(port) as wire, session_client(wire.port) as stub:
        await lookup(stub, 1)
        wire.flowing.clear()
        large = pb.LookupRequest(chunk_keys=bytes(4 << 20))
        given_up = await asyncio.gather(
            *(call(stub.Lookup, large, timeout_s=0.2) for _ in range(8)), return_exceptions=True
        )
        assert all(isinstance(each, DeadlineExceeded) for each in given_up)
        wire.flowing.set()
        assert (await lookup(stub, 2)).lease == b"2"
        assert gateway.sessions.stats == {"sessions": 1} and not gateway.released
        (session,) = gateway.sessions._sessions.values()
        assert session.absences == 0, "it was never interrupted"


async def test_a_client_that_stays_away_loses_its_session() -> None:
    gateway = SessionGateway(settings={"session_grace_ms": 100})
    async with serving(gateway) as port, Wire(port) as wire, session_client(wire.port) as stub:
        await lookup(stub, 1)
        wire.target = 1  # nothing listens there
        wire.cut()
        await eventually(lambda: gateway.released == [b"1"])
        with pytest.raises(NodeUnavailable):
            await lookup(stub, 2)
        wire.target = port
        assert (await _again(stub, 3)).lease == b"3"


async def _first(answers: AsyncIterator[Any]) -> Any:
    return await anext(answers)


async def _again(stub: GatewayServiceStub, ttl_ms: int) -> pb.LookupResponse:
    """As an engine would, until the channel has found its way."""
    async with asyncio.timeout(10):
        while True:
            try:
                return await lookup(stub, ttl_ms)
            except NodeUnavailable:
                await asyncio.sleep(0.05)


async def test_a_gateway_that_starts_again_knows_no_session() -> None:
    """What ran fails, as with a call of its own; what is asked from then on is answered."""
    first, second = SessionGateway(), SessionGateway()
    async with (
        serving(second) as port_2,
        serving(first) as port_1,
        Wire(port_1) as wire,
        session_client(wire.port) as stub,
    ):
        await lookup(stub, 1)
        events = fetch(stub, 5)
        first.gate.release()
        await anext(aiter(events))
        wire.target = port_2
        wire.cut()
        with pytest.raises(NodeUnavailable):
            await anext(aiter(events))
        assert (await _again(stub, 2)).lease == b"2"
        assert second.asked == [2]


class _Stopping(SessionGateway):
    """Ends the first session before it is open, as a gRPC server does that stops at that moment."""

    opened = 0

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[pb.SessionResponse]:
        self.opened += 1
        if self.opened == 1:
            context.set_code(grpc.StatusCode.CANCELLED)
            return
        async for response in super().Session(requests, context):
            yield response


async def test_a_session_that_a_stopping_gateway_cancels_is_opened_again() -> None:
    """None of its requests has been sent: a fetch is asked of the next gateway, and is not lost."""
    gateway = _Stopping()
    gateway.gate.release()
    gateway.gate.release()
    async with serving(gateway) as port, session_client(port) as stub, asyncio.timeout(10):
        events = [event async for event in stream(stub.Fetch, pb.FetchRequest(compute_window_us=2), timeout_s=5)]
    assert events and gateway.opened == 2


async def test_a_gateway_that_stops_answers_what_it_has_and_is_asked_nothing_more() -> None:
    """Requests that it has not taken go to the other one; leases stay, for they are good there too."""
    first, second = SessionGateway(), SessionGateway()
    server = Server("127.0.0.1:0", ["quire.v1.GatewayService"])
    add_GatewayServiceServicer_to_server(cast(Any, first), server.grpc)
    await server.start()
    async with serving(second) as port_2, session_client(f"127.0.0.1:{server.port},127.0.0.1:{port_2}") as stub:
        await lookup(stub, 1)
        assert first.asked and not second.asked, "the first of the list"
        slow = asyncio.create_task(lookup(stub, 2, "slow"))
        await eventually(lambda: 2 in first.asked)
        stop = asyncio.create_task(server.stop(5.0, first.sessions.leave))
        for ttl in range(3, 30):
            assert (await lookup(stub, ttl)).lease == b"%d" % ttl
        first.gate.release()
        assert (await slow).lease == b"2"
        await stop
        assert set(range(3, 30)) == {*first.asked, *second.asked} - {1, 2} and 29 in second.asked
        await first.sessions.close()
        assert not first.released


@pytest.mark.parametrize("ageing", [True, False])
async def test_clients_connect_anew_at_an_age_and_lose_nothing(ageing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs goes on where it is, and leases stay; what is asked later takes a new connection.

    Without sessions that leave, all stay on the connection that is too old.
    """
    if not ageing:
        monkeypatch.setattr(Session, "leave", lambda self: None)
    gateway = SessionGateway(settings={"connection_age_s": 0.2, "session_grace_ms": 50})
    async with serving(gateway) as port, Wire(port) as wire, session_client(wire.port) as stub:
        coming = aiter(fetch(stub, 30))
        for layer in range(29):
            gateway.gate.release()
            assert (await anext(coming)).layer.layer == layer
            assert (await lookup(stub, layer + 1)).lease == b"%d" % (layer + 1)
            await asyncio.sleep(0.05)
        assert (wire.connections >= 3) == ageing
        gateway.gate.release()
        assert [event.layer.layer async for event in coming] == [29]
        left = (0, 1) if ageing else (1,)  # none, once the last connection has reached its age
        await eventually(lambda: gateway.sessions.stats["sessions"] in left)
        assert not gateway.released


async def test_credentials_are_shown_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was revoked ends the session; one of another tenant does not go on with it."""
    monkeypatch.setattr(sessions, "_MISSED_RENEWALS", 1000)
    gateway = SessionGateway(settings={"session_renew_ms": 100})
    async with serving(gateway) as port, session_client(port, "key:secret") as stub:
        await lookup(stub, 1)
        (session,) = gateway.sessions._sessions.values()
        renewed_s = [session.renewed_s]
        while len(renewed_s) < 5:
            await eventually(lambda: session.renewed_s != renewed_s[-1])
            renewed_s.append(session.renewed_s)
        await lookup(stub, 2)
        assert gateway.sessions.stats == {"sessions": 1} and not gateway.released
        gateway.sessions._admission.authenticate = _revoked  # type: ignore[method-assign]
        await eventually(lambda: sorted(gateway.released) == [b"1", b"2"])
        with pytest.raises(Unauthenticated):
            await lookup(stub, 3)


async def _revoked(header: str) -> Principal:
    raise Unauthenticated("revoked", field="authorization")


async def test_redis_that_is_away_for_a_renewal_ends_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one that is slow hold up what else the client asks."""
    monkeypatch.setattr(sessions, "_MISSED_RENEWALS", 1000)
    gateway = SessionGateway(settings={"session_renew_ms": 300})
    answers, calm = asyncio.Event(), gateway.sessions._admission.authenticate
    tries = 0

    async def away(header: str) -> Principal:
        nonlocal tries
        tries += 1
        await answers.wait()
        raise MetadataUnavailable("Redis does not answer")

    async with serving(gateway) as port, session_client(port, "key") as stub:
        await lookup(stub, 1)
        gateway.sessions._admission.authenticate = away  # type: ignore[method-assign]
        await eventually(lambda: tries)
        assert (await lookup(stub, 2)).lease == b"2"
        answers.set()
        await eventually(lambda: tries >= 2)
        gateway.sessions._admission.authenticate = calm  # type: ignore[method-assign]
        assert (await lookup(stub, 3)).lease == b"3"
        (session,) = gateway.sessions._sessions.values()
        assert session.absences == 0 and not gateway.released


async def test_a_session_is_its_clients_alone() -> None:
    """Its name is a secret, and of no use to another principal."""
    gateway = SessionGateway()
    async with serving(gateway) as port, session_client(port, "one") as one:
        await lookup(one, 1)
        (token,) = gateway.sessions._sessions
        for header, resumed in (("Bearer two", False), ("Bearer one", True)):
            async with session_stream(port, ("authorization", header), (NAME_HEADER, token)) as stream_of_token:
                assert (await stream_of_token.read()).opened.resumed is resumed


async def test_bounds() -> None:
    """Requests of a session, sessions of a gateway, and answers that are not confirmed."""
    gateway = SessionGateway(settings={"session_requests_max": 4, "sessions_max": 1})
    async with serving(gateway) as port, session_client(port) as stub:
        slow = [asyncio.create_task(lookup(stub, ttl, "slow")) for ttl in range(4)]
        await eventually(lambda: len(gateway.asked) == 4)
        with pytest.raises(TooManyRequests, match="of this session") as refused:
            await lookup(stub, 9)
        assert refused.value.retry_after_s
        async with session_client(port) as second:
            with pytest.raises(TooManyRequests, match="sessions are open"):
                await lookup(second, 1)
        for _ in slow:
            gateway.gate.release()
        await asyncio.gather(*slow)


async def test_tenants_share_the_bounds_of_sessions() -> None:
    """Finding S6: one key held all sessions. Finding S5: and the memory of the gateway, by requests."""
    gateway = SessionGateway(settings={"sessions_max": 4, "sessions_bytes_max": 1 << 20})
    async with contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(serving(gateway))
        greedy = [await stack.enter_async_context(session_client(port, "greedy")) for _ in range(3)]
        for stub in greedy[:2]:
            await lookup(stub, 1)
        with pytest.raises(TooManyRequests, match="sessions are open"):
            await lookup(greedy[2], 1)
        other = await stack.enter_async_context(session_client(port, "other"))
        await lookup(other, 1)

        keys = bytes(400 << 10)
        slow = call(greedy[0].Lookup, pb.LookupRequest(host="slow", chunk_keys=keys), timeout_s=10)
        held = asyncio.create_task(slow)
        await eventually(lambda: gateway.asked.count(0) == 1)
        with pytest.raises(TooManyRequests, match="not served yet"):
            await call(greedy[1].Lookup, pb.LookupRequest(chunk_keys=keys), timeout_s=10)
        await call(other.Lookup, pb.LookupRequest(chunk_keys=bytes(300 << 10)), timeout_s=10)
        gateway.gate.release()
        await held
        await call(greedy[1].Lookup, pb.LookupRequest(chunk_keys=keys), timeout_s=10)


async def test_a_client_that_confirms_nothing_is_cut_off_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting answers keep no request in memory, and their number is bounded."""
    monkeypatch.setattr(session_module, "_UNANSWERED_MAX", 20)
    monkeypatch.setattr(session_module, "_KEPT_MAX", 4)
    gateway = SessionGateway()
    async with serving(gateway) as port, session_stream(port) as lazy:
        await lazy.read()
        for number in range(1, 20):
            await lazy.write(pb.SessionRequest(id=number, lookup=pb.LookupRequest(chunk_keys=bytes(32 << 10))))
        await eventually(lambda: len(gateway.asked) == 19)
        assert gateway.sessions._bytes.taken == 0, "they are served"
        for number in range(20, 26):  # four answers are kept, twenty requests wait, and that is one more
            await lazy.write(pb.SessionRequest(id=number, lookup=pb.LookupRequest()))
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await lazy.read():
                pass
        assert "are not answered" in await lazy.details()


async def test_a_request_that_is_stopped_while_its_answer_waits_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "_KEPT_MAX", 1)
    gateway = SessionGateway()
    async with serving(gateway) as port, session_stream(port) as stream_alone:
        await stream_alone.read()
        for number in (1, 2):
            await stream_alone.write(pb.SessionRequest(id=number, lookup=pb.LookupRequest(lease_ttl_ms=number)))
        assert (await stream_alone.read()).id == 1
        await eventually(lambda: gateway.asked == [1, 2])
        await stream_alone.write(pb.SessionRequest(id=3, cancel=2))
        await stream_alone.write(pb.SessionRequest(id=4, received=1, release=pb.ReleaseRequest()))
        answer = await asyncio.wait_for(stream_alone.read(), 10)
        assert answer.id == 2 and answer.last and answer.HasField("stopped")


async def test_a_client_that_confirms_nothing_has_its_requests_wait() -> None:
    gateway = SessionGateway()
    async with serving(gateway) as port, session_stream(port) as lazy:
        await lazy.read()
        await lazy.write(pb.SessionRequest(id=1, fetch=pb.FetchRequest(compute_window_us=2000)))
        for _ in range(2000):
            gateway.gate.release()
        numbers = [(await lazy.read()).number for _ in range(512)]
        assert numbers == list(range(1, 513))
        await asyncio.sleep(0.1)
        (session,) = gateway.sessions._sessions.values()
        assert len(session._kept) == 512 and not gateway.stopped
        await lazy.write(pb.SessionRequest(received=512))
        assert [(await lazy.read()).number for _ in range(512)] == list(range(513, 1025))
        with pytest.raises(Exception, match="answers, but there are"):
            await lazy.write(pb.SessionRequest(id=2, received=10_000, status=pb.StatusRequest()))
            while await lazy.read():
                pass
