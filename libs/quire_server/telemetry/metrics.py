"""The listener for metrics: `/metrics` for Prometheus, and the probes `/healthz`, `/readyz`, `/redundancy`.

It is served by the loop that it measures.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from quire_server.limits.connections import ASIDE_SHARE, KEEPALIVE_S, HttpConnections, connections_max, listen
from quire_server.readiness import readiness


@dataclass(slots=True)
class Gate:
    """Open when `why` is empty."""

    why: str = ""


redundancy: Final = Gate()
"""Closed by a storage node that has just started, until a roll may go on."""


@contextlib.asynccontextmanager
async def metrics_listener(address: str) -> AsyncIterator[None]:
    """Serve while the block runs; nothing for an empty address. Raises `ConfigInvalid` for one that is taken.

    A scrape runs in the loop: it sees numbers that fit together, and a loop that hangs is a target that is down.
    """
    if not address:
        yield
        return
    app = web.Application()
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/healthz", _healthy)
    app.router.add_get("/readyz", _ready)
    app.router.add_get("/redundancy", _redundant)
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=KEEPALIVE_S)
    await runner.setup()
    try:
        await listen(runner, address, HttpConnections(partial(connections_max, ASIDE_SHARE)))
        yield
    finally:
        await runner.cleanup()


async def _healthy(_: web.Request) -> web.Response:
    """The loop runs. For probes that cannot ask by gRPC, as with mutual TLS."""
    return web.Response(text="ok")


async def _ready(_: web.Request) -> web.Response:
    """Whether it serves, and has reached its dependencies."""
    why_not = readiness.why_not
    return web.Response(status=503, text=why_not) if why_not else web.Response(text="ok")


async def _redundant(_: web.Request) -> web.Response:
    """Whether it serves, and all copies that existed before its start exist: a rolling update waits for that."""
    if redundancy.why:
        return web.Response(status=503, text=redundancy.why)
    return await _ready(_)


async def _metrics(_: web.Request) -> web.Response:
    return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})
