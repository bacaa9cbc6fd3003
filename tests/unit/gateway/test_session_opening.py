"""How a session is opened, and how one is refused."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc
import pytest

from quire.model.errors import (
    Unauthenticated,
)
from quire.wire.channels import ChannelPool
from quire.wire.session import RECEIVED_HEADER, SESSION, SessionChannel
from quire.wire.v1.gateway_pb2_grpc import (
    GatewayServiceStub,
)
from tests.unit.gateway.rig import SessionGateway, lookup, serving


class _Late:
    """A channel whose process pauses as it is about to write."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def stream_stream(self, path: str, *, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def serialized(message: Any) -> bytes:
            time.sleep(0.05)
            return cast(bytes, request_serializer(message))

        return self._channel.stream_stream(path, serialized, response_deserializer)


@contextlib.contextmanager
def _refusing() -> Iterator[int]:
    """A server in threads of its own, which asks for credentials and reads nothing."""

    def refuse(requests: Any, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "revoked")

    server = grpc.server(ThreadPoolExecutor(1))
    handlers: dict[str, Any] = {"Session": grpc.stream_stream_rpc_method_handler(refuse)}
    server.add_registered_method_handlers("quire.v1.GatewayService", handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait()


async def test_a_refusal_is_heard_however_early_it_comes() -> None:
    """gRPC says INTERNAL of a stream that was refused if it is written to before that was read."""
    with _refusing() as port:
        pool = ChannelPool()
        late: Any = _Late(pool.get(f"127.0.0.1:{port}"))
        for _ in range(10):
            session = SessionChannel(late, "any")
            with pytest.raises(Unauthenticated):
                await lookup(GatewayServiceStub(cast(Any, session)), 1)
            await session.close()
        await pool.close()


async def test_what_names_a_session_badly_is_refused() -> None:
    gateway = SessionGateway()
    async with serving(gateway) as port:
        pool = ChannelPool()
        for received in ("-1", "many", ""):
            begin = pool.get(f"127.0.0.1:{port}").stream_stream(SESSION)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await begin(metadata=((RECEIVED_HEADER, received),)).read()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert gateway.sessions.stats == {"sessions": 0}
        await pool.close()
