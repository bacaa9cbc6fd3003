"""The event loop of the blocking client, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop
from opentelemetry import context as otel

from quire.client.client import AsyncClient
from quire.model.errors import DeadlineExceeded

Result = TypeVar("Result")


class SyncLoop:
    """Runs the coroutines of a client on a loop of its own."""

    def __init__(self, client: AsyncClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-client", daemon=True)

    def run(self, coroutine: Coroutine[Any, Any, Result], longer_s: float = 0.0) -> Result:
        """Run on the client's loop, in the caller's trace, and wait.

        Raises `DeadlineExceeded` after twice the client's `timeout_s`, and `longer_s`; the work is cancelled then.
        """
        current = otel.get_current()

        async def in_context() -> Result:
            token = otel.attach(current)
            try:
                return await coroutine
            finally:
                otel.detach(token)

        limit_s = self._timeout_s * 2 + longer_s
        running = asyncio.run_coroutine_threadsafe(in_context(), self._loop)
        try:
            return running.result(limit_s)
        except TimeoutError:
            if running.done():
                raise  # the work's own
            running.cancel()
            raise DeadlineExceeded(f"no end within {limit_s:g} s") from None

    def spawn(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run on the client's loop; do not wait."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def post(self, work: Callable[[], object]) -> None:
        """Call on the client's loop, soon; do not wait. In order. Nothing once the client is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work)

    def on_loop(self, work: Callable[[], Result]) -> Result:
        """Call on the client's loop, and wait."""

        async def call() -> Result:
            return work()

        return self.run(call())

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._timeout_s)
        self._loop.close()
