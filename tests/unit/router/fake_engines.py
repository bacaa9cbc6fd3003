"""Engines for the router's tests: real HTTP servers that fail on request, in the ways that real ones do."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import aiohttp
from aiohttp import web

from quire_tools.local.ports import free_ports
from quire_tools.router.server import Router, serving
from quire_tools.router.settings import EngineRole, RouterSettings, addresses

MODEL = "model"


class Fault(Enum):
    """How an engine fails."""

    NONE = "it works"
    REFUSES = "answers 500"
    BUSY = "answers 429"
    HANGS = "answers nothing, not even probes"
    BREAKS = "closes the connection before the first token"
    BREAKS_LATER = "closes the connection behind the first token"
    ERROR_EVENT = "answers 200 and an error event"
    DRAINS = "answers probes by 503, and goes on with its requests"


@dataclass
class FakeEngine:
    """An engine that answers with its name and the tokens of the prompt."""

    name: str
    fault: Fault = Fault.NONE
    answers_after: asyncio.Event | None = None
    description: dict[str, Any] | None = None
    models: Sequence[str] = (MODEL,)
    models_fail: int = 0
    description_hangs: bool = False
    tokenizes: bool = True
    asked: list[dict[str, Any]] = field(default_factory=list)
    cancelled: int = 0
    port: int = 0
    traces: list[str] = field(default_factory=list)
    cookies: list[str] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    probes: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[FakeEngine]:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/embeddings", self._embed)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        (self.port,) = (self.port,) if self.port else free_ports(1)
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        self.probes += 1
        if self.fault is Fault.HANGS:
            await asyncio.sleep(3600)
        return web.Response(status=503 if self.fault is Fault.DRAINS else 200)

    async def _models(self, request: web.Request) -> web.Response:
        if self.models_fail:
            self.models_fail -= 1
            return web.Response(status=503)
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.tokenizes:
            await asyncio.sleep(3600)
        body = await request.json()
        text = body["prompt"] if "prompt" in body else json.dumps(body["messages"])
        return web.json_response({"tokens": list(text.encode())})

    async def _embed(self, request: web.Request) -> web.Response:
        return web.json_response({"from": self.name})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        parameters = body.get("kv_transfer_params") or {}
        if (parameters.get("quire") or {}).get("describe"):
            if self.description_hangs:
                await asyncio.sleep(3600)
            return web.json_response({"kv_transfer_params": self.description})
        self.asked.append(body)
        self.traces.append(request.headers.get("traceparent", ""))
        self.cookies.append(request.headers.get("Cookie", ""))
        self.request_ids.append(request.headers.get("X-Request-Id", ""))
        try:
            return await self._answer(request, body)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.answers_after is not None:
            await self.answers_after.wait()
        if self.fault in (Fault.REFUSES, Fault.BUSY):
            status = 500 if self.fault is Fault.REFUSES else 429
            return web.json_response({"error": {"message": self.name}}, status=status)
        if self.fault is Fault.HANGS:
            await asyncio.sleep(3600)
        if self.fault is Fault.BREAKS:
            return _broken(request)
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": self.name}]}, headers={"Set-Cookie": "of=one-client"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.fault is Fault.ERROR_EVENT:
            await response.write(b'data: {"error": {"message": "the engine died", "code": 500}}\n\n')
            return response
        for number in range(4):
            await response.write(b"data: " + json.dumps({"choices": [{"text": self.name}]}).encode() + b"\n\n")
            if number == 1 and self.fault is Fault.BREAKS_LATER:
                return _broken(request)
        await response.write(b"data: [DONE]\n\n")
        return response


def _broken(request: web.Request) -> web.Response:
    """Close the connection without another byte."""
    assert request.transport is not None, "the client is there"
    request.transport.abort()
    return web.Response()


@contextlib.asynccontextmanager
async def routed(
    engines: Sequence[FakeEngine] = (),
    prefill: Sequence[FakeEngine] = (),
    decode: Sequence[FakeEngine] = (),
    **changes: Any,
) -> AsyncIterator[tuple[Router, RoutedClient]]:
    """A router in front of engines that run, once all of them are up."""
    (port,) = free_ports(1)
    urls = [[engine.url for engine in group] for group in (engines, prefill, decode)]
    settings: dict[str, Any] = {"health_s": 0.05, "down_after_s": 0.3, "prefill_tokens_min": 1, **changes}
    async with (
        serving(RouterSettings(listen=f"127.0.0.1:{port}", engines=addresses(*urls), **settings)) as router,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        async with asyncio.timeout(30):
            while not all(engine.is_up for engine in router.engines) or _undescribed(
                router, *engines, *prefill, *decode
            ):
                await asyncio.sleep(0.01)
        yield router, RoutedClient(session)


def _undescribed(router: Router, *engines: FakeEngine) -> bool:
    described = {engine.url for engine in engines if engine.description is not None and not engine.description_hangs}
    return any(engine.name in described and engine.naming is None for engine in router.engines)


@dataclass
class RoutedClient:
    """A client of the router."""

    session: aiohttp.ClientSession

    async def ask(self, prompt: Any = "a prompt", *, stream: bool = False, **body: Any) -> tuple[int, str, str]:
        """Return the status, the engine that answered, and the body."""
        question = {"model": MODEL, "prompt": prompt, "stream": stream, **body}
        async with self.session.post("/v1/completions", json=question) as answer:
            return answer.status, answer.headers.get("X-Quire-Engine", ""), await answer.text()


async def until(happened: Callable[[], bool]) -> AsyncIterator[int]:
    """Number prompts until a condition is true, 128 at most: the choice of an engine depends on its port."""
    for number in range(128):
        yield number
        if happened():
            return
    raise AssertionError("it has not happened after 128 prompts")


def was_tried(router: Router, bad: FakeEngine) -> bool:
    """Return whether an engine was asked; one that hangs may count as down before its turn comes."""
    return bool(bad.asked) or not all(engine.is_up for engine in router.engines if engine.name == bad.url)


__all__ = ["MODEL", "EngineRole", "FakeEngine", "Fault", "RoutedClient", "routed", "until", "was_tried"]
