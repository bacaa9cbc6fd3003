"""`examples/endpoint-picker`, asked as Envoy asks it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire_tools.local.ports import free_ports
from quire_tools.router.settings import RouterSettings, addresses
from tests.unit.router.fake_engines import MODEL, FakeEngine, Fault

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "endpoint-picker" / "endpoint_picker.py"
FULL_DUPLEX = 4
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("endpoint_picker", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@asynccontextmanager
async def picking(example: Any, engines: Sequence[FakeEngine]) -> AsyncIterator[grpc.aio.Channel]:
    """A picker that is ready."""
    (port,) = free_ports(1)
    urls = [engine.url for engine in engines]
    settings = RouterSettings(
        listen=f"127.0.0.1:{port}", engines=addresses(urls, [], []), health_s=0.05, down_after_s=0.3, grace_s=0.1
    )
    serving = asyncio.create_task(example.serve(settings))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(60):
        await _until_ready(channel, wanted=True)
        yield channel
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def _until_ready(channel: grpc.aio.Channel, *, wanted: bool) -> None:
    while (await _status(channel, "readiness") == SERVING) != wanted:
        await asyncio.sleep(0.02)


async def _status(channel: grpc.aio.Channel, service: str) -> int:
    """0 while it knows no such service."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True)
    except grpc.aio.AioRpcError:
        return 0
    status: int = answer.status
    return status


class Envoy:
    """A stream as Envoy opens it for one request."""

    def __init__(self, example: Any, channel: grpc.aio.Channel, subset: Sequence[str] | None = None) -> None:
        self._messages = example.messages
        self._stream = example.services.ExternalProcessorStub(channel).Process()
        self._subset = subset

    async def ask(self, path: str, *pieces: bytes, duplex: bool = False) -> Any:
        """Send headers and body, and return the first answer."""
        m = self._messages
        headers = m.HttpHeaders(headers=m.HeaderMap(headers=[m.HeaderValue(key=":path", raw_value=path.encode())]))
        headers.end_of_stream = not pieces
        first = m.ProcessingRequest(request_headers=headers)
        if duplex:
            first.protocol_config.request_body_mode = FULL_DUPLEX
            first.protocol_config.response_body_mode = FULL_DUPLEX
        if self._subset is not None:
            first.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(
                {"x-gateway-destination-endpoint-subset": list(self._subset)}
            )
        await self._stream.write(first)
        for number, piece in enumerate(pieces):
            body = m.HttpBody(body=piece, end_of_stream=number == len(pieces) - 1)
            await self._stream.write(m.ProcessingRequest(request_body=body))
        return await self.read()

    async def read(self) -> Any:
        return await self._stream.read()

    async def body(self) -> bytes:
        """The body that is sent back."""
        body = bytearray()
        while True:
            common = (await self.read()).request_body.response
            streamed = common.body_mutation.streamed_response
            body += streamed.body
            if streamed.end_of_stream or not common.HasField("body_mutation"):
                return bytes(body)

    async def answer(self, *pieces: bytes) -> bytes:
        """Send the engine's answer, and return what the client receives."""
        await self.answer_begins()
        received = b""
        for number, piece in enumerate(pieces):
            body = self._messages.HttpBody(body=piece, end_of_stream=number == len(pieces) - 1)
            await self._stream.write(self._messages.ProcessingRequest(response_body=body))
            common = (await self.read()).response_body.response
            received += common.body_mutation.streamed_response.body if common.HasField("body_mutation") else piece
        return received

    async def answer_begins(self) -> None:
        await self._stream.write(self._messages.ProcessingRequest(response_headers=self._messages.HttpHeaders()))
        assert (await self.read()).WhichOneof("response") == "response_headers"

    async def close(self) -> None:
        await self._stream.done_writing()
        assert await self.read() is grpc.aio.EOF


def question(prompt: str = "a prompt", **more: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": prompt, **more}).encode()


def endpoints(answer: Any) -> list[str]:
    """Return the endpoints that header and metadata name; both name the same."""
    (header,) = answer.request_headers.response.header_mutation.set_headers
    named: str = header.header.raw_value.decode()
    assert header.header.key == "x-gateway-destination-endpoint"
    assert answer.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == named
    return named.split(",")


@pytest.mark.parametrize("duplex", [False, True])
async def test_endpoints_are_named_in_the_order_to_try(example: Any, duplex: bool) -> None:
    async with (
        FakeEngine("one").run() as one,
        FakeEngine("two").run() as two,
        picking(example, [one, two]) as channel,
    ):
        long, first_of = question("x" * 200_000), []
        for _ in range(2):
            envoy = Envoy(example, channel)
            named = endpoints(await envoy.ask("/v1/completions", long[:1000], long[1000:], duplex=duplex))
            assert sorted(named) == sorted(engine.url.removeprefix("http://") for engine in (one, two))
            first_of.append(named[0])
            assert await envoy.body() == (long if duplex else b"")
        assert len(set(first_of)) == 2, "the first one has a queue"
        assert await envoy.answer(b"data: one\n\n", b"data: two\n\n") == b"data: one\n\ndata: two\n\n"
        await envoy.close()


async def test_only_what_the_gateway_allows_is_named(example: Any) -> None:
    async with (
        FakeEngine("one").run() as one,
        FakeEngine("two").run() as two,
        picking(example, [one, two]) as channel,
    ):
        allowed = two.url.removeprefix("http://")
        for number in range(4):
            envoy = Envoy(example, channel, [allowed])
            assert endpoints(await envoy.ask("/v1/completions", question(str(number)))) == [allowed]
        for subset in ([], ["10.0.0.1:80"]):
            refused = await Envoy(example, channel, subset).ask("/v1/completions", question())
            assert refused.immediate_response.status.code == 503


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (question(kv_transfer_params={"quire": {"retain_s": "long"}}), 400), (question(model="other"), 503)],
)
async def test_requests_that_are_refused(example: Any, body: bytes, status: int) -> None:
    async with FakeEngine("one").run() as one, picking(example, [one]) as channel:
        answer = await Envoy(example, channel).ask("/v1/completions", body)
        assert answer.immediate_response.status.code == status
        assert json.loads(answer.immediate_response.body)["error"]["message"]


async def test_other_paths_and_readiness(example: Any) -> None:
    async with FakeEngine("one").run() as one, picking(example, [one]) as channel:
        assert endpoints(await Envoy(example, channel).ask("/v1/models")) == [one.url.removeprefix("http://")]
        one.fault = Fault.HANGS
        await _until_ready(channel, wanted=False)
        assert await _status(channel, "liveness") == SERVING
