"""Bounds on connections, on real listeners."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc

import quire_server.grpc_server as grpc_server_module
from quire_server.access import certs
from quire_server.grpc_server import Server
from quire_server.limits.connections import HttpConnections, listen
from quire_tools.local.ports import free_ports

_REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
_LATE_S = 20.0
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Frontend:
    """An HTTP server of at most three connections. Requests end when `answer` is set."""

    def __init__(self) -> None:
        self.connections = HttpConnections(lambda: 3)
        self.answer = asyncio.Event()
        self.begun = asyncio.Semaphore(0)
        self.port = free_ports(1)[0]
        self.text = ""

    async def serve(self, request: web.BaseRequest) -> web.Response:
        with self.connections.serving(request):
            self.begun.release()
            await self.answer.wait()
            return web.Response(text=f"ok{self.text}")

    async def connect(self) -> Stream:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, stream: Stream) -> None:
        """Send a request, and wait until its answering has begun."""
        stream[1].write(_REQUEST)
        async with asyncio.timeout(_LATE_S):
            await self.begun.acquire()


@contextlib.asynccontextmanager
async def _frontend(context: ssl.SSLContext | None = None) -> AsyncIterator[_Frontend]:
    frontend = _Frontend()
    runner = web.ServerRunner(web.Server(frontend.serve), shutdown_timeout=0.1)
    await runner.setup()
    await listen(runner, f"127.0.0.1:{frontend.port}", frontend.connections, context)
    try:
        yield frontend
    finally:
        frontend.answer.set()
        await runner.cleanup()


async def _closed(stream: Stream) -> bool:
    """Wait until the server ends the connection."""
    async with asyncio.timeout(_LATE_S):
        return await stream[0].read() == b""


async def _answered(stream: Stream) -> bool:
    async with asyncio.timeout(_LATE_S):
        return (await stream[0].readuntil(b"ok")).startswith(b"HTTP/1.1 200")


async def test_a_newcomer_replaces_the_oldest_that_never_asked() -> None:
    async with _frontend() as frontend:
        frontend.answer.set()
        idle = await frontend.connect()
        await frontend.ask(idle)
        assert await _answered(idle)
        silent = [await frontend.connect() for _ in range(2)]
        newcomer = await frontend.connect()
        assert await _closed(silent[0])
        for stream in (idle, silent[1], newcomer):
            await frontend.ask(stream)
            assert await _answered(stream)


async def test_one_that_is_served_is_never_replaced() -> None:
    async with _frontend() as frontend:
        served = [await frontend.connect() for _ in range(3)]
        for stream in served:
            await frontend.ask(stream)
        assert await _closed(await frontend.connect()), "there is no connection that it could replace"
        frontend.answer.set()
        assert [await _answered(stream) for stream in served] == [True] * 3
        await frontend.ask(await frontend.connect())


async def test_connections_that_were_lost_count_no_longer() -> None:
    async with _frontend() as frontend:
        frontend.answer.set()
        for _ in range(8):
            stream = await frontend.connect()
            await frontend.ask(stream)
            assert await _answered(stream)
            stream[1].close()
            await stream[1].wait_closed()
        assert len(frontend.connections) <= 3


async def test_without_descriptors_a_listener_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener accepts again once there are descriptors, and pauses in between."""
    async with _frontend() as frontend:
        frontend.answer.set()
        tries = []

        def accept(listening: socket.socket) -> None:
            tries.append(listening)
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "accept", accept)
            stream = await frontend.connect()
            await asyncio.sleep(0.35)
        assert 1 <= len(tries) <= 5
        await frontend.ask(stream)
        assert await _answered(stream)


async def test_handshakes_count(tmp_path: Path) -> None:
    """Silent connections to a TLS port make room for clients that complete their handshake."""
    public = certs.make(tmp_path, [], days=1).public
    served, trusted = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    served.load_cert_chain(public.cert, public.key)
    trusted.check_hostname, trusted.verify_mode = False, ssl.CERT_NONE
    async with _frontend(served) as frontend:
        frontend.answer.set()
        silent = [socket.create_connection(("127.0.0.1", frontend.port)) for _ in range(20)]  # accepted in one go
        streams = [await asyncio.open_connection(sock=connection) for connection in silent]
        ends = [asyncio.create_task(_closed(stream)) for stream in streams]
        await asyncio.wait(ends[:17], timeout=_LATE_S)
        assert sum(end.done() for end in ends) == 17 and len(frontend.connections) == 3
        stream = await asyncio.open_connection("127.0.0.1", frontend.port, ssl=trusted)
        await frontend.ask(stream)
        assert await _answered(stream)
        for end in ends:
            end.cancel()


async def test_a_connection_that_lingers_is_aborted() -> None:
    """A connection that was closed for a newcomer, with an unread answer, keeps its place for one newcomer at most."""
    async with _frontend() as frontend:
        frontend.text = "x" * (32 << 20)
        frontend.answer.set()
        lingering = [await frontend.connect() for _ in range(3)]
        for stream in lingering:
            stream[0]._transport.pause_reading()  # type: ignore[attr-defined]
            await frontend.ask(stream)
        await asyncio.sleep(0.1)
        frontend.text = ""
        for _ in range(12):
            await frontend.ask(await frontend.connect())
            assert len(frontend.connections) <= 4


async def test_a_grpc_server_takes_so_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server_module, "connections_max", lambda share: 2)
    server = Server("127.0.0.1:0", [], public=True)
    await server.start()
    try:
        address = f"127.0.0.1:{server.port}"
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            check = stub.Check
            await check(health_pb2.HealthCheckRequest(), timeout=_LATE_S)
            strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]
            refused = [stranger for stranger in strangers if _is_closed(stranger)]
            assert len(refused) == 3, "one besides the honest client's"
            await check(health_pb2.HealthCheckRequest(), timeout=_LATE_S)
            for stranger in strangers:
                stranger.close()
    finally:
        await server.stop(0)


def _is_closed(stranger: socket.socket) -> bool:
    """Whether the server hangs up instead of beginning HTTP/2."""
    stranger.settimeout(_LATE_S)
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True


async def test_a_grpc_peer_that_answers_no_ping_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = {"grpc.keepalive_time_ms": 500, "grpc.keepalive_timeout_ms": 500, "grpc.http2.ping_timeout_ms": 500}
    options = [(name, quick.get(name, value)) for name, value in grpc_server_module._OPTIONS]
    monkeypatch.setattr(grpc_server_module, "_OPTIONS", options)
    server = Server("127.0.0.1:0", [])
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
        async with asyncio.timeout(_LATE_S):
            frames = await reader.read(-1)  # until the server hangs up
        assert bytes((0, 0, 8, 6)) in frames, "it has sent a ping"
    finally:
        await server.stop(0)
