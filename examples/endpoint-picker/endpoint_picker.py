"""An endpoint picker for Kubernetes' Gateway API Inference Extension that chooses engines as `quire router` does.

python endpoint_picker.py --engine http://10.0.0.5:8000 --engine http://10.0.0.6:8000 --gateway quire-gateway:7410

It speaks Envoy's external processing, as the extension's proposal 004 says: for each request it answers with the
endpoints to try in turn. It needs grpcio-tools, which compiles `ext_proc.proto` when this starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import aiohttp
import grpc
import typer
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from quire.client import AsyncClient
from quire_tools.router.choice import Candidate, Choice
from quire_tools.router.engine import RoutedEngine
from quire_tools.router.health import Health
from quire_tools.router.prompts import Prompt, Tokenizer
from quire_tools.router.requests import RequestError, read_request
from quire_tools.router.settings import RouterSettings, addresses

sys.path.insert(0, str(Path(__file__).parent))
messages, services = grpc.protos_and_services("ext_proc.proto")

DESTINATION: Final = "x-gateway-destination-endpoint"
SUBSET_SPACE: Final = "envoy.lb.subset_hint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SERVICES: Final = ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
FULL_DUPLEX: Final = 4
PIECE_BYTES: Final = 60_000
BODY_MAX: Final = 64 << 20


class EndpointPicker(services.ExternalProcessorServicer):  # type: ignore[misc, name-defined, unused-ignore]
    """Every stream is one HTTP request."""

    def __init__(self, engines: Sequence[RoutedEngine], choice: Choice, tokenizer: Tokenizer) -> None:
        self._engines, self._choice, self._tokenizer = engines, choice, tokenizer

    async def Process(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Pick when the request is complete; its prompt counts as queued until the answer begins."""
        with contextlib.ExitStack() as running:
            headers, subset, body, queued = {}, None, bytearray(), None
            modes = messages.ProtocolConfiguration()
            async for request in requests:
                kind = request.WhichOneof("request")
                if request.HasField("protocol_config"):  # in the first message alone
                    modes = request.protocol_config
                if kind is None:
                    continue
                if kind == "request_headers":
                    headers = {header.key: _value(header) for header in request.request_headers.headers.headers}
                    subset = _subset(request.metadata_context)
                elif kind == "request_body":
                    body += request.request_body.body
                    if len(body) > BODY_MAX:
                        yield _refusal(RequestError(413, f"more than {BODY_MAX} bytes"))
                        return
                if kind.startswith("response"):
                    if queued is not None:
                        queued.end()
                    yield _go_on(kind, request, modes)
                    continue
                if kind != "request_trailers" and not getattr(request, kind).end_of_stream:
                    continue  # answered when it is complete
                try:
                    prompt, candidates = await self._pick(headers, bytes(body), subset)
                except RequestError as error:
                    yield _refusal(error)
                    return
                best = candidates[0]
                queued = running.enter_context(best.engine.request(best.to_compute(prompt)))
                yield _destination([_endpoint(candidate.engine) for candidate in candidates])
                if kind != "request_headers":
                    is_last = kind == "request_body"
                    for piece in _body(bytes(body), modes.request_body_mode == FULL_DUPLEX, is_last):
                        yield piece
                if kind == "request_trailers":
                    yield _go_on(kind, request, modes)

    async def _pick(
        self, headers: dict[str, str], body: bytes, subset: set[str] | None
    ) -> tuple[Prompt, Sequence[Candidate]]:
        """Return the prompt, and the engines in the order in which they are to be tried. Raises `RequestError`."""
        path = headers.get(":path", "").partition("?")[0]
        is_generation = path in ("/v1/completions", "/v1/chat/completions")
        request = read_request(path, body, headers) if is_generation else None
        model = request.model if request is not None else ""
        engines = [engine for engine in self._engines if engine.serves(model)]
        if subset is not None:
            engines = [engine for engine in engines if _endpoint(engine) in subset]
        if not engines:
            raise RequestError(503, "no engine is up that may serve this", retry_after_s=2)
        if request is None:
            engine = min(engines, key=lambda engine: engine.requests)
            return Prompt(tokens=(), length=1), [Candidate(engine=engine, cached_tokens=0, tokens_per_s=1.0)]
        prompt = await self._tokenizer.prompt_of(request, engines)
        return prompt, await self._choice.order(prompt, engines)


def _value(header: Any) -> str:
    return header.raw_value.decode(errors="replace") or header.value


def _endpoint(engine: RoutedEngine) -> str:
    return urlsplit(engine.address.url).netloc


def _subset(metadata: Any) -> set[str] | None:
    """Return the endpoints that the gateway allows; None for all."""
    if SUBSET not in (space := metadata.filter_metadata.get(SUBSET_SPACE, {})):
        return None
    value = space[SUBSET]
    return {endpoint.strip() for endpoint in (value.split(",") if isinstance(value, str) else value)}


def _destination(endpoints: Sequence[str]) -> Any:
    """Answer the request's headers, by header and metadata: gateways read one or the other."""
    named = ",".join(endpoints)
    header = messages.HeaderValueOption(header=messages.HeaderValue(key=DESTINATION, raw_value=named.encode()))
    common = messages.CommonResponse(
        header_mutation=messages.HeaderMutation(set_headers=[header]), clear_route_cache=True
    )
    answer = messages.ProcessingResponse(request_headers=messages.HeadersResponse(response=common))
    answer.dynamic_metadata.update({"envoy.lb": {DESTINATION: named}})
    return answer


def _body(body: bytes, duplex: bool, is_last: bool) -> Sequence[Any]:
    """Answer the request's body, unchanged: in full duplex it is sent back in pieces. `is_last`: no trailers come."""
    if not duplex:
        return [messages.ProcessingResponse(request_body=messages.BodyResponse())]
    pieces = [body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES)] or [b""]
    return [
        _streamed("request_body", piece, is_last and number == len(pieces) - 1) for number, piece in enumerate(pieces)
    ]


def _streamed(kind: str, piece: bytes, is_last: bool) -> Any:
    streamed = messages.StreamedBodyResponse(body=piece, end_of_stream=is_last)
    common = messages.CommonResponse(body_mutation=messages.BodyMutation(streamed_response=streamed))
    return messages.ProcessingResponse(**{kind: messages.BodyResponse(response=common)})


def _go_on(kind: str, request: Any, modes: Any) -> Any:
    """Answer a message of the engine's answer, or trailers, unchanged."""
    if kind == "response_headers":
        return messages.ProcessingResponse(response_headers=messages.HeadersResponse())
    if kind == "response_body":
        if modes.response_body_mode == FULL_DUPLEX:
            return _streamed(kind, request.response_body.body, request.response_body.end_of_stream)
        return messages.ProcessingResponse(response_body=messages.BodyResponse())
    return messages.ProcessingResponse(**{kind: messages.TrailersResponse()})


def _refusal(error: RequestError) -> Any:
    status = messages.HttpStatus(code=error.status)
    refusal = messages.ImmediateResponse(status=status, body=json.dumps(error.body()).encode())
    return messages.ProcessingResponse(immediate_response=refusal)


async def serve(settings: RouterSettings) -> None:
    """Serve until cancelled; ready while an engine is up."""
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        client = None
        if settings.gateway:
            client = await stack.enter_async_context(AsyncClient(settings.gateway, token=settings.token))
        engines = [RoutedEngine(address, settings.down_after_s) for address in settings.engines]
        server, checks = grpc.aio.server(), health.aio.HealthServicer()
        picker = EndpointPicker(engines, Choice(client, settings), Tokenizer(session, {}))
        services.add_ExternalProcessorServicer_to_server(picker, server)
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        server.add_insecure_port(settings.listen)
        probes = Health(session, {}, settings)
        async with asyncio.TaskGroup() as tasks:
            for engine in engines:
                tasks.create_task(probes.watch(engine))
            await server.start()
            stack.push_async_callback(server.stop, settings.grace_s)
            while True:
                is_ready = any(engine.is_up for engine in engines)
                for name in SERVICES:
                    await checks.set(name, SERVING if is_ready or name == "liveness" else NOT_SERVING)
                await asyncio.sleep(settings.health_s)


def main(
    engine: Annotated[list[str], typer.Option(help="URL of an engine; can be repeated")],
    gateway: Annotated[str, typer.Option(help="host:port of Quire's gateway; empty: choose without Quire")] = "",
    listen: Annotated[str, typer.Option(help="host:port of this picker")] = "0.0.0.0:9002",
) -> None:
    """Serve until Ctrl-C."""
    asyncio.run(serve(RouterSettings(listen=listen, engines=addresses(engine, [], []), gateway=gateway)))


if __name__ == "__main__":
    typer.run(main)
