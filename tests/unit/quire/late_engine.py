"""A client and its loop for tests of copies, and faults that can be put into their order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np

from quire.client import Buffer
from quire.testing.devices import LateDevice
from quire.transport.devices import PASSED, Event

LIMIT_S = 10.0


class NoOrder(LateDevice):
    """The engine's later work does not wait for copies."""

    def order(self, event: Event) -> None:
        pass


class NoAfter(LateDevice):
    """Copies do not wait for the engine's earlier work."""

    def submit(self, copies: Callable[[], None], dependency: Event | None = None) -> Event:
        return super().submit(copies)


class TooEarly(LateDevice):
    """Events have passed before their copies have run."""

    def submit(self, copies: Callable[[], None], dependency: Event | None = None) -> Event:
        super().submit(copies, dependency)
        return PASSED


class LoopClient:
    """A client whose deliveries bring `payload`, (layers, chunks, bytes), and whose stores keep layers in `sent`."""

    def __init__(self, payload: np.ndarray[Any, Any]) -> None:
        self.asynchronous = self
        self.payload = payload
        self.sent: list[np.ndarray[Any, Any]] = []
        self.log: list[str] = []
        self.works: list[Future[Any]] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        self.works.append(asyncio.run_coroutine_threadsafe(work, self._loop))
        return self.works[-1]

    def post(self, call: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(call)

    def settle(self) -> None:
        """Wait until all work has ended."""
        for work in self.works:
            work.result(LIMIT_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    # ---- what loads and stores ask

    async def reach(self) -> None:
        pass

    async def release(self, lookup: Any) -> None:
        pass

    async def fetch(self, lookup: Any, buffer: Buffer, **_: Any) -> Any:
        self.log.append("fetch")
        layers, chunks, size = self.payload.shape
        buffer.layers(layers, chunks, size)[:] = self.payload
        return self.delivery()

    def delivery(self) -> Any:
        """Return one that has arrived."""

        async def nothing(*_: Any) -> None:
            pass

        return SimpleNamespace(
            num_layers=len(self.payload), arrival=nothing, quiesced=nothing, wanted=lambda _: None, abandon=lambda: None
        )

    async def store(self, namespace: Any, keys: Any, first: int, memory: Buffer, **_: Any) -> Any:
        rows = memory.layers(*self.payload.shape)

        async def finish() -> None:
            pass

        return SimpleNamespace(layer_ready=lambda layer: self.sent.append(rows[layer].copy()), commit=finish)
