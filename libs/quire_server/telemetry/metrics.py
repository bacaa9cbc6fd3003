"""The listener for metrics: `/metrics` for Prometheus, served by the loop that it measures, `/healthz`, `/readyz`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from quire.model.errors import ConfigInvalid

readiness: Final = threading.Event()
"""Set by the server while it takes requests."""


@contextlib.asynccontextmanager
async def metrics_listener(listen: str) -> AsyncIterator[None]:
    """Serve while the block runs; nothing for an empty address. Raises `ConfigInvalid` for one that is taken.

    A scrape runs in the loop: it sees numbers that fit together, and a loop that hangs is a target that is down.
    """
    if not listen:
        yield
        return
    app = web.Application()
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/healthz", _healthy)
    app.router.add_get("/readyz", _ready)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    host, _, port = listen.rpartition(":")
    try:
        await web.TCPSite(runner, host or None, int(port)).start()
    except (OSError, ValueError) as error:
        await runner.cleanup()
        raise ConfigInvalid(f"metrics cannot be served at {listen!r}: {error}") from None
    try:
        yield
    finally:
        await runner.cleanup()


async def _healthy(_: web.Request) -> web.Response:
    """The loop runs. For probes that cannot ask by gRPC, as with mutual TLS."""
    return web.Response(text="ok")


async def _ready(_: web.Request) -> web.Response:
    """It serves, and is not about to stop."""
    return web.Response(text="ok") if readiness.is_set() else web.Response(status=503, text="not serving")


async def _metrics(_: web.Request) -> web.Response:
    return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})
