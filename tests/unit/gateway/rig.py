"""A gateway that answers sessions from a script, clients of it, and a wire between them that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

from quire.model.errors import (
    InvalidRequest,
    MetadataUnavailable,
    Unauthenticated,
)
from quire.testing import FakeClock
from quire.wire.channels import ChannelPool, Stop, call, stream
from quire.wire.session import METHODS, SessionChannel
from quire.wire.v1 import gateway_pb2 as pb
from quire.wire.v1.gateway_pb2_grpc import (
    GatewayServiceStub,
    add_GatewayServiceServicer_to_server,
)
from quire_gateway.access.admission import Admission, Principal
from quire_gateway.config import GatewayConfig
from quire_gateway.grpc.session import Session
from quire_gateway.grpc.sessions import Sessions
from quire_gateway.kv.contacted_nodes import contacted, finished
from quire_server.clock import SystemClock
from quire_server.grpc_server import Server
from quire_server.redis.keys.access import AccessKey


class KeysInMemory:
    """The `Keys` port of revocations, without Redis."""

    def __init__(self) -> None:
        self.keys: dict[str, AccessKey] = {}
        self.deleted: set[str] = set()
        self.tenants: dict[str, str] = {}
        self.down = False

    async def get(self, name: str) -> AccessKey | None:
        if self.down:
            raise MetadataUnavailable("Redis is down")
        return self.keys.get(name)


class Admits(Admission):
    """The header is the tenant's name, and of its access key where it has one."""

    async def authenticate(self, header: str) -> Principal:
        keys: Any = self._keys
        if header == "Bearer revoked" or header in keys.deleted:
            raise Unauthenticated("revoked", field="authorization")
        return Principal(tenant=keys.tenants.get(header, header), key=keys.keys.get(header))


@dataclass
class SessionGateway:
    """Answers, and remembers what became of it. `gate`: a fetch waits for it before each event.

    A fetch asks as many nodes as it has chunks; one of them is quiet with each event.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    released: list[bytes] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    keys: KeysInMemory = field(default_factory=KeysInMemory)

    def __post_init__(self) -> None:
        config = self.config = GatewayConfig(cluster_secret="s" * 32, **{"session_grace_ms": 300, **self.settings})
        self.admission = Admits(config, cast(Any, self.keys), SystemClock())
        self.sessions = Sessions(
            config=config,
            methods=self,
            admission=self.admission,
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
        names = [b"%d" % request.lease_ttl_ms]
        names += [b"%d of shard %d" % (request.lease_ttl_ms, at) for at, _ in enumerate(request.other_shards)]
        response, *other_shards = (
            pb.LookupResponse(matched_chunks=1, lease=name, lease_expires_ms=1 << 60) for name in names
        )
        response.other_shards.extend(other_shards)
        return response

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        return pb.ReleaseResponse(released=True)

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> AsyncIterator[pb.FetchResponse]:
        for node in range(request.descriptor.chunk_count):
            contacted(f"storage-{node}")
        try:
            for layer in range(request.compute_window_us):
                await self.gate.acquire()
                finished(f"storage-{layer}")
                yield pb.FetchResponse(layer=pb.LayerArrived(layer=layer))
        finally:
            self.stopped.append("fetch")


for _name in (method.name for method in METHODS.values()):  # those that are not asked here
    if not hasattr(SessionGateway, _name):
        setattr(SessionGateway, _name, None)


def recording_session() -> tuple[Session, list[int]]:
    """Return a session without a client, and the ids of the requests that it has begun."""
    requests = list[int]()

    async def answer(session: Session, message: pb.SessionRequest) -> None:
        requests.append(message.id)

    async def release(lease: bytes) -> None: ...

    return Session(cast(Any, None), answer, release, FakeClock()), requests


class Wire:
    """A TCP proxy whose connections can be cut."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.flowing = asyncio.Event()
        self.flowing.set()
        self._writers: list[asyncio.StreamWriter] = []
        self.connections = 0

    async def __aenter__(self) -> Wire:
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
        self.connections += 1
        with contextlib.suppress(OSError):
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self.flowing.wait()
            writer.write(data)
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def serving(gateway: SessionGateway) -> AsyncIterator[int]:
    age_s = gateway.config.connection_age_s
    server = Server("127.0.0.1:0", ["quire.v1.GatewayService"], connection_age_s=age_s)
    add_GatewayServiceServicer_to_server(cast(Any, gateway), server.grpc)
    await server.start()
    try:
        yield server.port
    finally:
        await server.stop(0)
        await gateway.sessions.close()


@contextlib.asynccontextmanager
async def session_client(port: int | str, token: str = "") -> AsyncIterator[GatewayServiceStub]:
    pool = ChannelPool()
    address = f"127.0.0.1:{port}" if isinstance(port, int) else port
    session = SessionChannel(pool.get(address), token)
    try:
        channel: Any = session
        yield GatewayServiceStub(channel)
    finally:
        await session.close()
        await pool.close()


@contextlib.asynccontextmanager
async def session_stream(port: int, *metadata: tuple[str, str | bytes]) -> AsyncIterator[Any]:
    """A session's stream without the client: what is written and read is up to the test."""
    pool = ChannelPool()
    stub: Any = GatewayServiceStub(pool.get(f"127.0.0.1:{port}"))
    stream = stub.Session(metadata=metadata)
    try:
        yield stream
    finally:
        stream.cancel()
        await pool.close()


async def lookup(stub: GatewayServiceStub, ttl_ms: int, host: str = "", timeout_s: float = 5.0) -> pb.LookupResponse:
    answer: pb.LookupResponse = await call(
        stub.Lookup, pb.LookupRequest(lease_ttl_ms=ttl_ms, host=host), timeout_s=timeout_s
    )
    return answer


def fetch(
    stub: GatewayServiceStub, layers: int, timeout_s: float = 10.0, *, nodes: int = 0, stop: Stop | None = None
) -> AsyncIterator[Any]:
    request = pb.FetchRequest(compute_window_us=layers)
    request.descriptor.chunk_count = nodes
    return stream(stub.Fetch, request, timeout_s=timeout_s, stop=stop)
