"""The event loop of the blocking client, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import uvloop
from opentelemetry import context as otel

from quire.client.client import AsyncClient
from quire.model.errors import DeadlineExceeded, InvalidRequest

Result = TypeVar("Result")
_CANCEL_S: Final = 5.0
"""For which cancelled work may take to end."""


class SyncLoop:
    """Runs the coroutines of a client on a loop of its own."""

    def __init__(self, client: AsyncClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._loop = uvloop.new_event_loop()
        self._posted: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-client", daemon=True)

    def run(self, coroutine: Coroutine[Any, Any, Result], longer_s: float = 0.0) -> Result:
        """Run on the client's loop, in the caller's trace, and wait.

        Raises `DeadlineExceeded` after twice the client's `timeout_s`, and `longer_s`, `InvalidRequest` if the client
        does not run. Whatever ends the wait, as Ctrl-C does, cancels the work, and its end is waited for.
        """
        if why := self._why_not():
            coroutine.close()
            raise InvalidRequest(why, field="client")
        current, ended = otel.get_current(), threading.Event()

        async def in_context() -> Result:
            token = otel.attach(current)
            try:
                return await coroutine
            finally:
                otel.detach(token)
                ended.set()

        limit_s = self._timeout_s * 2 + longer_s
        running = asyncio.run_coroutine_threadsafe(in_context(), self._loop)
        try:
            return running.result(limit_s)
        except BaseException as error:
            if running.done() and not running.cancelled():
                raise  # the work's own
            running.cancel()
            ended.wait(_CANCEL_S)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"no end within {limit_s:g} s") from None
            raise

    def _why_not(self) -> str:
        """Why nothing can be run; "" if it can."""
        if self._loop.is_closed():
            return "it is closed; make another one"
        if self._thread.ident is None:
            return "it is not started: use `with Client(...) as client`"
        if threading.get_ident() == self._thread.ident:
            return "called on its own thread, where nothing may wait for it"
        return ""

    @property
    def is_running(self) -> bool:
        """Whether it is started and not closed."""
        return self._thread.ident is not None and not self._loop.is_closed()

    def run_or_post(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run on the client's loop and wait; on the client's own thread, as the garbage collector may be, do not wait.

        Nothing once the client is closed, which has ended everything.
        """
        if not self.is_running:
            return
        if threading.get_ident() != self._thread.ident:
            self.run(work())
            return
        task = self._loop.create_task(work())
        self._posted.add(task)
        task.add_done_callback(self._posted.discard)

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
