"""Peers without credentials take no place from others (finding S3)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from quire.model.errors import Unauthenticated
from quire.wire.v1 import gateway_pb2 as pb
from quire.wire.v1.gateway_pb2_grpc import GatewayServiceStub, add_GatewayServiceServicer_to_server
from quire_server import grpc_server
from quire_server.access import unauthenticated
from quire_server.grpc_server import Server

_PLACES = 100
_KNOWN = (("authorization", "Bearer known"),)


class _Gateway:
    """Answers every method; `Fetch` by a stream."""

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:
        return pb.StatusResponse()

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> AsyncIterator[pb.FetchResponse]:
        for layer in range(request.compute_window_us):
            yield pb.FetchResponse(layer=pb.LayerArrived(layer=layer))

    def __getattr__(self, name: str) -> Any:
        return self.Status


@dataclass(frozen=True)
class _Caller:
    tenant: str


async def _authenticate(context: Any) -> _Caller:
    headers = dict(map(tuple, context.invocation_metadata()))
    if headers.get("authorization") != "Bearer known":
        raise Unauthenticated("unknown")
    return _Caller(str(headers.get("tenant", "")))


@pytest_asyncio.fixture
async def channel(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[grpc.aio.Channel]:
    monkeypatch.setattr(grpc_server, "_UNSHARED_MAX", 0)
    server = Server("127.0.0.1:0", ["quire.v1.GatewayService"], requests_max=_PLACES, authenticate=_authenticate)
    add_GatewayServiceServicer_to_server(cast(Any, _Gateway()), server.grpc)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as made:
        yield made
    await server.stop(0)


async def _serves(channel: grpc.aio.Channel) -> None:
    stub: Any = GatewayServiceStub(channel)
    await stub.Status(pb.StatusRequest(), timeout=10, metadata=_KNOWN)
    fetched = stub.Fetch(pb.FetchRequest(compute_window_us=3), timeout=10, metadata=_KNOWN)
    assert [event.layer.layer async for event in fetched] == [0, 1, 2]


async def _never() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


def _half_sent(channel: grpc.aio.Channel, path: str, metadata: Any = ()) -> Any:
    """A call whose request never comes."""
    call: Any = channel.stream_unary(path)
    return call(_never(), metadata=metadata)


async def test_health_watches_leave_places(channel: grpc.aio.Channel) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
    watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(_PLACES)]

    async def first(watch: Any) -> bool:
        try:
            return bool((await watch.read()).status == health_pb2.HealthCheckResponse.SERVING)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            return False

    assert sum(await asyncio.gather(*map(first, watches))) == 64
    await _serves(channel)
    assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status
    for watch in watches:
        watch.cancel()


async def test_reflection_answers_and_is_bounded(channel: grpc.aio.Channel) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(cast(Any, channel))

    async def ask() -> AsyncIterator[Any]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        await asyncio.Event().wait()

    asked = [stub.ServerReflectionInfo(ask()) for _ in range(_PLACES)]
    answers = await asyncio.gather(*(each.read() for each in asked), return_exceptions=True)
    listed = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert len(listed) == 16 and "quire.v1.GatewayService" in str(listed[0])
    await _serves(channel)
    for each in asked:
        each.cancel()


@pytest.mark.parametrize("method", ["Lookup", "Fetch", "Store"])
async def test_calls_without_a_request_are_refused_by_their_headers(channel: grpc.aio.Channel, method: str) -> None:
    half = [_half_sent(channel, f"/quire.v1.GatewayService/{method}") for _ in range(_PLACES)]
    for call in half:
        with pytest.raises(grpc.aio.AioRpcError, match="unknown"):
            await asyncio.wait_for(call, 10)
    await _serves(channel)


async def test_an_authenticated_caller_has_a_time_to_send_its_request(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unauthenticated, "_FIRST_MESSAGE_S", 0.1)
    half = _half_sent(channel, "/quire.v1.GatewayService/Lookup", _KNOWN)
    with pytest.raises(grpc.aio.AioRpcError, match="no request within"):
        await asyncio.wait_for(half, 10)
    await _serves(channel)


@pytest.mark.parametrize("path", ["/quire.v1.TraceService/ListSpans", "/grpc.health.v1.Health/Check"])
async def test_half_sent_calls_of_other_services_leave_places(channel: grpc.aio.Channel, path: str) -> None:
    half = [_half_sent(channel, path) for _ in range(_PLACES)]
    await asyncio.sleep(0.2)
    await _serves(channel)
    for call in half:
        call.cancel()


async def test_a_request_that_cannot_be_decoded_is_invalid(channel: grpc.aio.Channel) -> None:
    call: Any = channel.unary_unary("/quire.v1.GatewayService/Lookup")
    with pytest.raises(grpc.aio.AioRpcError, match="cannot be decoded") as refused:
        await call(b"\xff\xff\xff", timeout=10, metadata=_KNOWN)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_tenant_leaves_half_of_the_requests_to_others(channel: grpc.aio.Channel) -> None:
    """Requests that are authenticated, and never come."""
    path = "/quire.v1.GatewayService/Status"
    calls = [_half_sent(channel, path, (*_KNOWN, ("tenant", "greedy"))) for _ in range(_PLACES)]
    refused = await asyncio.wait_for(_ended(calls, _PLACES // 2), 30)
    assert {await call.code() for call in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    stub: Any = GatewayServiceStub(channel)
    await stub.Status(pb.StatusRequest(), timeout=10, metadata=(*_KNOWN, ("tenant", "neighbour")))
    for call in calls:
        call.cancel()


async def _ended(calls: list[Any], count: int) -> list[Any]:
    """Wait until `count` calls have ended, and return them."""
    while len(ended := [call for call in calls if call.done()]) < count:
        await asyncio.sleep(0.01)
    return ended
