"""The router's HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Final
from urllib.parse import unquote

import aiohttp
import uvloop
from aiohttp import web
from aiohttp.http_exceptions import PayloadEncodingError
from opentelemetry.metrics import CallbackOptions, Observation
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from quire.client import AsyncClient
from quire.telemetry import background, logger, meter, names
from quire_server.grpc_server import until_signalled
from quire_server.http_requests import IDLE_S, HttpRequests, traced
from quire_server.limits.connections import KEEPALIVE_S, listen
from quire_server.service import raise_descriptors
from quire_server.tasks import end
from quire_server.telemetry import configure
from quire_tools.router.answers import ClientGone
from quire_tools.router.choice import Choice
from quire_tools.router.engine import RoutedEngine
from quire_tools.router.forwarding import Forwarding
from quire_tools.router.health import Health
from quire_tools.router.known_blocks import EventSource
from quire_tools.router.prompts import Tokenizer
from quire_tools.router.requests import CHAT, COMPLETIONS, REQUEST_ID, REQUEST_ID_HEADER, RequestError, read_request
from quire_tools.router.settings import EngineRole, RouterSettings

_BODY_MAX: Final = 64 << 20
_SHARE: Final = 0.4
_ID_LENGTH_MAX: Final = 64
_ENGINE_KEEPALIVE_S: Final = 4.0
"""Shorter than that of engines: vLLM closes idle connections after five seconds."""
_STOP_MORE_S: Final = 10.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def run(settings: RouterSettings) -> None:
    """Serve until SIGINT or SIGTERM. Raises `ConfigInvalid` for an address that is taken."""
    raise_descriptors()
    configure("router", metrics_too=True)
    uvloop.run(_run(settings))


async def _run(settings: RouterSettings) -> None:
    async with serving(settings):
        logger().info("ready", listen=settings.listen, engines=len(settings.engines), gateway=settings.gateway)
        logger().info("stops", reason=await until_signalled(settings.grace_s + _STOP_MORE_S))


@contextlib.asynccontextmanager
async def serving(settings: RouterSettings) -> AsyncIterator[Router]:
    """Serve during the block; at its end requests have `grace_s` to end."""
    async with contextlib.AsyncExitStack() as stack:
        client = None
        if settings.gateway:
            client = AsyncClient(settings.gateway, token=settings.token, timeout_s=settings.assign_s)
            await stack.enter_async_context(client)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_ENGINE_KEEPALIVE_S)
        cookies = aiohttp.DummyCookieJar()  # of one client they are not for the next
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, cookie_jar=cookies))
        router = Router(settings, session, client)
        stack.push_async_callback(router.close)
        await router.start()
        yield router


class Router:
    """The HTTP server, and the tasks that watch engines.

    Args:
        settings: Of the router.
        session: For requests to engines.
        client: Of Quire; None to route without it.
    """

    def __init__(self, settings: RouterSettings, session: aiohttp.ClientSession, client: AsyncClient | None) -> None:
        key = {"Authorization": f"Bearer {settings.engine_key}"} if settings.engine_key else {}
        self.engines = [RoutedEngine(address, settings.down_after_s) for address in settings.engines]
        self._settings = settings
        self._health = Health(session, key, settings)
        choice, tokenizer = Choice(client, settings), Tokenizer(session, key)
        self._forwarding = Forwarding(session, self.engines, choice, tokenizer, settings)
        self._requests = HttpRequests("router", _SHARE)
        self._tasks: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None
        meter().create_observable_gauge(names.ROUTER_ENGINES, [self._observe], "1", "engines, by role and state")

    async def start(self) -> None:
        """Probe engines, and listen. Raises `ConfigInvalid` for an address that is taken."""
        app = web.Application(middlewares=[self._measured])
        app.router.add_post(COMPLETIONS, self._complete)
        app.router.add_post(CHAT, self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/healthz", self._healthy)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/health", self._ready)
        app.router.add_route("*", "/v1/{rest:.*}", self._pass_on)
        app.router.add_post("/tokenize", self._pass_on)
        app.router.add_post("/detokenize", self._pass_on)
        for engine in self.engines:
            self._tasks.append(asyncio.create_task(self._health.watch(engine), context=background()))
            if engine.blocks is not None:
                source = EventSource(engine.address.events, engine.blocks)
                self._tasks.append(asyncio.create_task(source.run(), context=background()))
        self._runner = web.AppRunner(
            app,
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            shutdown_timeout=self._settings.grace_s,
            handler_cancellation=True,
        )
        await self._runner.setup()
        await listen(self._runner, self._settings.listen, self._requests.connections)

    async def close(self) -> None:
        """End requests, and the tasks."""
        if self._runner is not None:
            await self._runner.cleanup()
        await end(set(self._tasks))

    @web.middleware
    async def _measured(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        request_id = request.headers.get(REQUEST_ID_HEADER, "")[:_ID_LENGTH_MAX]
        request_id = request_id if request_id.isascii() and request_id.isprintable() else ""
        request[REQUEST_ID] = request_id = request_id or os.urandom(8).hex()
        with (
            self._requests.timed(request) as answer,
            traced(request, names.ROUTER_REQUEST, request_id, strangers=False),
        ):
            response = await self._answered(request, handler)
            answer.status = response.status
        if not response.prepared:
            response.headers.setdefault(REQUEST_ID_HEADER, request_id)
        return response

    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer; errors are in OpenAI's form."""
        try:
            return await handler(request)
        except RequestError as error:
            return error.response()
        except ClientGone:
            raise ConnectionResetError from None
        except web.HTTPException as error:
            return RequestError(error.status, error.reason).response()
        except (web.RequestPayloadError, PayloadEncodingError, RecursionError) as error:
            response = RequestError(400, f"the body cannot be read: {error}").response()
            response.force_close()  # the rest of the body cannot be read either
            return response
        except ConnectionError:
            raise  # the client has closed its connection
        except Exception as error:
            logger().error("a request failed unexpectedly", path=request.path, exc_info=error)
            return RequestError(500, "the router's log has the details").response()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._forwarding.forward(
            read_request(request.path, await _body_of(request), request.headers), request
        )

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if not {".", ".."}.isdisjoint(unquote(request.raw_path.partition("?")[0]).split("/")):
            raise RequestError(404, "the path leaves /v1/")
        body = await _body_of(request)
        return await self._forwarding.pass_on(request, _model_of(body), body)

    async def _models(self, request: web.Request) -> web.Response:
        records = {name: record for engine in self.engines if engine.is_up for name, record in engine.models.items()}
        return web.json_response({"object": "list", "data": [records[name] for name in sorted(records)]})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _healthy(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _ready(self, request: web.Request) -> web.Response:
        """Whether an engine can answer. Without prefill engines the decode engines compute prompts themselves."""
        if self._forwarding.serving("", EngineRole.BOTH, EngineRole.DECODE):
            return web.Response(text="ok")
        return web.Response(status=503, text="no engine is up")

    def _observe(self, _: CallbackOptions) -> Iterable[Observation]:
        for role in {engine.address.role for engine in self.engines}:
            ours = [engine for engine in self.engines if engine.address.role is role]
            up = sum(engine.is_up for engine in ours)
            for state, count in (("up", up), ("down", len(ours) - up)):
                yield Observation(count, {"quire.role": role.value, "quire.state": state})


async def _body_of(request: web.Request) -> bytes:
    """Read a request's body. Raises `RequestError` for one that is too large, or stops for a minute."""
    body = bytearray()
    try:
        while True:
            async with asyncio.timeout(IDLE_S):
                piece = await request.content.readany()
            if not piece:
                return bytes(body)
            body += piece
            if len(body) > _BODY_MAX:
                raise RequestError(413, f"the body has more than {_BODY_MAX} bytes")
    except TimeoutError:
        raise RequestError(408, f"no part of the body came for {IDLE_S:g} s") from None


def _model_of(body: bytes) -> str:
    """Return the model that a request names; empty for none."""
    with contextlib.suppress(ValueError, RecursionError):
        record: Any = json.loads(body)
        if isinstance(record, dict):
            return str(record.get("model") or "")
    return ""
