"""Clients' sessions over real gRPC: what they own, what ends with them, and what a broken connection costs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
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
from quire.wire.channels import ChannelPool, call, stream
from quire.wire.session import METHODS, SessionChannel, _failure
from quire.wire.status import error_of
from quire.wire.v1 import gateway_pb2 as pb
from quire.wire.v1.gateway_pb2_grpc import (
    GatewayServiceStub,
    add_GatewayServiceServicer_to_server,
)
from quire_gateway.admission import Admission, Principal
from quire_gateway.config import GatewayConfig
from quire_gateway.grpc.sessions import Sessions
from quire_server.clock import SystemClock
from quire_server.grpc_server import Server


class _Admission(Admission):
    """The header is the tenant's name."""

    async def authenticate(self, header: str) -> Principal:
        if header == "Bearer revoked":
            raise Unauthenticated("revoked", field="authorization")
        return Principal(tenant=header)


@dataclass
class _Gateway:
    """Answers, and remembers what became of it. `gate`: a fetch waits for it before each event."""

    settings: dict[str, Any] = field(default_factory=dict)
    released: list[bytes] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    def __post_init__(self) -> None:
        config = GatewayConfig(cluster_secret="s" * 32, **{"session_grace_ms": 300, **self.settings})
        nothing: Any = None
        self.sessions = Sessions(
            config=config,
            methods=self,
            admission=_Admission(config, nothing, SystemClock()),
            release=self.release,
            clock=SystemClock(),
        )

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[pb.SessionResponse]:
        async for response in self.sessions.serve(requests, context):
            yield response

    async def release(self, lease: bytes) -> None:
        self.released.append(lease)

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        """A lease named by the lifetime that is asked for."""
        self.asked.append(request.lease_ttl_ms)
        if request.host == "slow":
            try:
                await self.gate.acquire()
            except asyncio.CancelledError:
                self.stopped.append("lookup")
                raise
        if request.host == "bad":
            raise InvalidRequest("not so", field="host")
        lease = b"%d" % request.lease_ttl_ms
        return pb.LookupResponse(matched_chunks=1, lease=lease, lease_expires_ms=1 << 60)

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        return pb.ReleaseResponse(released=True)

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> AsyncIterator[pb.FetchResponse]:
        try:
            for layer in range(request.compute_window_us):
                await self.gate.acquire()
                yield pb.FetchResponse(layer=pb.LayerArrived(layer=layer))
        finally:
            self.stopped.append("fetch")


for _name in (method.name for method in METHODS.values()):  # those that are not asked here
    if not hasattr(_Gateway, _name):
        setattr(_Gateway, _name, None)


class _Wire:
    """A TCP proxy whose connections can be cut."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.flowing = asyncio.Event()
        self.flowing.set()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> _Wire:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self._writers += [writer, far_writer]
        with contextlib.suppress(OSError):
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self.flowing.wait()
            writer.write(data)
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def _serving(gateway: _Gateway) -> AsyncIterator[int]:
    server = Server("127.0.0.1:0", ["quire.v1.GatewayService"])
    add_GatewayServiceServicer_to_server(cast(Any, gateway), server.grpc)
    await server.start()
    try:
        yield server.port
    finally:
        await server.stop(0)
        await gateway.sessions.close()


@contextlib.asynccontextmanager
async def _client(port: int | str, token: str = "") -> AsyncIterator[GatewayServiceStub]:
    pool = ChannelPool()
    address = f"127.0.0.1:{port}" if isinstance(port, int) else port
    session = SessionChannel(pool.get(address), token)
    try:
        channel: Any = session
        yield GatewayServiceStub(channel)
    finally:
        await session.close()
        await pool.close()


async def _lookup(stub: GatewayServiceStub, ttl_ms: int, host: str = "", timeout_s: float = 5.0) -> pb.LookupResponse:
    answer: pb.LookupResponse = await call(
        stub.Lookup, pb.LookupRequest(lease_ttl_ms=ttl_ms, host=host), timeout_s=timeout_s
    )
    return answer


def _fetch(stub: GatewayServiceStub, layers: int, timeout_s: float = 10.0) -> AsyncIterator[pb.FetchResponse]:
    return stream(stub.Fetch, pb.FetchRequest(compute_window_us=layers), timeout_s=timeout_s)


async def _until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_many_requests_share_a_stream_and_fail_by_themselves() -> None:
    gateway = _Gateway()
    async with _serving(gateway) as port, _client(port) as stub:
        answers = await asyncio.gather(*(_lookup(stub, ttl) for ttl in range(1, 40)))
        assert [answer.lease for answer in answers] == [b"%d" % ttl for ttl in range(1, 40)]
        with pytest.raises(InvalidRequest, match="host: not so") as bad:
            await _lookup(stub, 1, "bad")
        assert bad.value.answered and bad.value.field == "host"
        with pytest.raises(DeadlineExceeded):
            await _lookup(stub, 1, "slow", timeout_s=0.05)
        await _until(lambda: gateway.stopped)
        assert gateway.stopped == ["lookup"] and gateway.sessions.stats == {"sessions": 1}


async def test_what_a_client_has_ends_with_it_and_at_once() -> None:
    """Its leases, but for those that it gave back, and what it has running."""
    gateway = _Gateway(settings={"session_grace_ms": 60_000})
    async with _serving(gateway) as port:
        async with _client(port) as stub:
            for ttl in (1, 2, 3):
                await _lookup(stub, ttl)
            await call(stub.Release, pb.ReleaseRequest(lease=b"2"), timeout_s=5)
            gateway.gate.release()
            events = _fetch(stub, 5)
            assert (await anext(aiter(events))).layer.layer == 0
            slow = asyncio.create_task(_lookup(stub, 9, "slow"))
            await _until(lambda: 9 in gateway.asked)
        with pytest.raises(QuireError):
            await slow
        await _until(lambda: len(gateway.released) == 2)
        assert sorted(gateway.released) == [b"1", b"3"]
        assert sorted(gateway.stopped) == ["fetch", "lookup"]
        assert gateway.sessions.stats == {"sessions": 0}


async def test_a_request_that_is_given_up_is_stopped() -> None:
    gateway = _Gateway()
    async with _serving(gateway) as port, _client(port) as stub:
        events = _fetch(stub, 5)
        gateway.gate.release()
        await anext(aiter(events))
        await events.aclose()  # type: ignore[attr-defined]
        await _until(lambda: gateway.stopped)
        assert gateway.stopped == ["fetch"]


async def test_a_request_that_ends_with_its_time_was_not_answered() -> None:
    """Told so as an answer, a client would take it for refused before any node was asked, and use its memory again."""
    gateway = _Gateway()
    async with _serving(gateway) as port:
        pool = ChannelPool()
        plain: GatewayServiceStub = GatewayServiceStub(pool.get(f"127.0.0.1:{port}"))
        begin: Any = plain.Session
        late = begin()
        await late.write(pb.SessionRequest(open=pb.SessionOpen()))
        await late.read()
        await late.write(pb.SessionRequest(id=1, timeout_ms=50, fetch=pb.FetchRequest(compute_window_us=5)))
        failed = _failure((await late.read()).error)
        assert failed.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        error = error_of(failed)
        assert isinstance(error, DeadlineExceeded) and not error.answered
        assert gateway.stopped == ["fetch"]
        late.cancel()
        await pool.close()


async def test_a_connection_that_breaks_costs_no_answer() -> None:
    """Events that came while the client was away are there when it is back, once each and in order."""
    gateway = _Gateway(settings={"session_grace_ms": 10_000})
    async with _serving(gateway) as port, _Wire(port) as wire, _client(wire.port) as stub:
        events = _fetch(stub, 200)
        coming = aiter(events)
        gateway.gate.release()
        seen = [(await anext(coming)).layer.layer]
        for _ in range(5):
            for _ in range(20):
                gateway.gate.release()
            wire.cut()
            seen.append((await anext(coming)).layer.layer)
            assert (await _lookup(stub, 7)).lease == b"7"
        for _ in range(200):
            gateway.gate.release()
        seen += [event.layer.layer async for event in coming]
        assert seen == list(range(200))
        assert gateway.stopped == ["fetch"] and not gateway.released
        assert gateway.sessions.stats == {"sessions": 1}


async def test_a_request_that_is_given_up_while_it_is_sent_costs_itself_only() -> None:
    """A write that is cancelled ends its stream: so none is, whatever has given up waiting for it."""
    gateway = _Gateway()
    async with _serving(gateway) as port, _Wire(port) as wire, _client(wire.port) as stub:
        await _lookup(stub, 1)
        wire.flowing.clear()
        large = pb.LookupRequest(chunk_keys=bytes(4 << 20))
        given_up = await asyncio.gather(
            *(call(stub.Lookup, large, timeout_s=0.2) for _ in range(8)), return_exceptions=True
        )
        assert all(isinstance(each, DeadlineExceeded) for each in given_up)
        wire.flowing.set()
        assert (await _lookup(stub, 2)).lease == b"2"
        assert gateway.sessions.stats == {"sessions": 1} and not gateway.released
        (session,) = gateway.sessions._sessions.values()
        assert session.absences == 0, "it was never interrupted"


async def test_a_client_that_stays_away_loses_its_session() -> None:
    gateway = _Gateway(settings={"session_grace_ms": 100})
    async with _serving(gateway) as port, _Wire(port) as wire, _client(wire.port) as stub:
        await _lookup(stub, 1)
        wire.target = 1  # nothing listens there
        wire.cut()
        await _until(lambda: gateway.released == [b"1"])
        with pytest.raises(NodeUnavailable):
            await _lookup(stub, 2)
        wire.target = port
        assert (await _again(stub, 3)).lease == b"3"


async def _again(stub: GatewayServiceStub, ttl_ms: int) -> pb.LookupResponse:
    """As an engine would, until the channel has found its way."""
    async with asyncio.timeout(10):
        while True:
            try:
                return await _lookup(stub, ttl_ms)
            except NodeUnavailable:
                await asyncio.sleep(0.05)


async def test_a_gateway_that_starts_again_knows_no_session() -> None:
    """What ran fails, as with a call of its own; what is asked from then on is answered."""
    first, second = _Gateway(), _Gateway()
    async with _serving(second) as port_2, _serving(first) as port_1, _Wire(port_1) as wire, _client(wire.port) as stub:
        await _lookup(stub, 1)
        events = _fetch(stub, 5)
        first.gate.release()
        await anext(aiter(events))
        wire.target = port_2
        wire.cut()
        with pytest.raises(NodeUnavailable):
            await anext(aiter(events))
        assert (await _again(stub, 2)).lease == b"2"
        assert second.asked == [2]


async def test_a_gateway_that_stops_answers_what_it_has_and_is_asked_nothing_more() -> None:
    """Requests that it has not taken go to the other one; leases stay, for they are good there too."""
    first, second = _Gateway(), _Gateway()
    server = Server("127.0.0.1:0", ["quire.v1.GatewayService"])
    add_GatewayServiceServicer_to_server(cast(Any, first), server.grpc)
    await server.start()
    async with _serving(second) as port_2, _client(f"127.0.0.1:{server.port},127.0.0.1:{port_2}") as stub:
        gateways = [first, second]
        await _lookup(stub, 1)
        serving = next(each for each in gateways if each.asked)
        assert serving is first, "the first of the list"
        slow = asyncio.create_task(_lookup(stub, 2, "slow"))
        await _until(lambda: 2 in first.asked)
        stop = asyncio.create_task(server.stop(5.0, first.sessions.leave))
        for ttl in range(3, 30):
            assert (await _lookup(stub, ttl)).lease == b"%d" % ttl
        first.gate.release()
        assert (await slow).lease == b"2"
        await stop
        assert set(range(3, 30)) == {*first.asked, *second.asked} - {1, 2} and 29 in second.asked
        await first.sessions.close()
        assert not first.released


async def test_credentials_are_shown_again() -> None:
    """One that was revoked ends the session; one of another tenant does not go on with it."""
    gateway = _Gateway(settings={"session_renew_ms": 100})
    async with _serving(gateway) as port, _client(port, "key:secret") as stub:
        await _lookup(stub, 1)
        await asyncio.sleep(0.5)  # longer than three renewals may be missed
        await _lookup(stub, 2)
        assert gateway.sessions.stats == {"sessions": 1} and not gateway.released
        gateway.sessions._admission.authenticate = _revoked  # type: ignore[method-assign]
        await _until(lambda: sorted(gateway.released) == [b"1", b"2"])
        with pytest.raises(Unauthenticated):
            await _lookup(stub, 3)


async def _revoked(header: str) -> Principal:
    raise Unauthenticated("revoked", field="authorization")


async def test_redis_that_is_away_for_a_renewal_ends_no_session() -> None:
    """Nor does one that is slow hold up what else the client asks."""
    gateway = _Gateway(settings={"session_renew_ms": 300})
    answers, calm = asyncio.Event(), gateway.sessions._admission.authenticate
    tries = 0

    async def away(header: str) -> Principal:
        nonlocal tries
        tries += 1
        await answers.wait()
        raise MetadataUnavailable("Redis does not answer")

    async with _serving(gateway) as port, _client(port, "key") as stub:
        await _lookup(stub, 1)
        gateway.sessions._admission.authenticate = away  # type: ignore[method-assign]
        await _until(lambda: tries)
        assert (await _lookup(stub, 2)).lease == b"2"
        answers.set()
        await _until(lambda: tries == 2)
        gateway.sessions._admission.authenticate = calm  # type: ignore[method-assign]
        assert (await _lookup(stub, 3)).lease == b"3"
        (session,) = gateway.sessions._sessions.values()
        assert session.absences == 0 and not gateway.released


async def test_a_session_is_its_clients_alone() -> None:
    """Its name is a secret, and of no use to another principal."""
    gateway = _Gateway()
    async with _serving(gateway) as port, _client(port, "one") as one:
        await _lookup(one, 1)
        (token,) = gateway.sessions._sessions
        pool = ChannelPool()
        for header, resumed in (("Bearer two", False), ("Bearer one", True)):
            plain: GatewayServiceStub = GatewayServiceStub(pool.get(f"127.0.0.1:{port}"))
            begin: Any = plain.Session
            other = begin(metadata=(("authorization", header),))
            await other.write(pb.SessionRequest(open=pb.SessionOpen(session=token)))
            assert (await other.read()).opened.resumed is resumed
            other.cancel()
        await pool.close()


async def test_bounds() -> None:
    """Requests of a session, sessions of a gateway, and answers that are not confirmed."""
    gateway = _Gateway(settings={"session_requests_max": 4, "sessions_max": 1})
    async with _serving(gateway) as port, _client(port) as stub:
        slow = [asyncio.create_task(_lookup(stub, ttl, "slow")) for ttl in range(4)]
        await _until(lambda: len(gateway.asked) == 4)
        with pytest.raises(TooManyRequests, match="of this session") as refused:
            await _lookup(stub, 9)
        assert refused.value.retry_after_s
        async with _client(port) as second:
            with pytest.raises(TooManyRequests, match="sessions are open"):
                await _lookup(second, 1)
        for _ in slow:
            gateway.gate.release()
        await asyncio.gather(*slow)


async def test_a_client_that_confirms_nothing_has_its_requests_wait() -> None:
    gateway = _Gateway()
    async with _serving(gateway) as port:
        pool = ChannelPool()
        plain: GatewayServiceStub = GatewayServiceStub(pool.get(f"127.0.0.1:{port}"))
        begin: Any = plain.Session
        lazy = begin()
        await lazy.write(pb.SessionRequest(open=pb.SessionOpen()))
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
        await pool.close()
