"""Turns at something shared: the wire, in bytes, or the places of chunkwise deliveries, in deliveries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire_storage.core.drr import DeficitRoundRobin

_SLOW_S = 0.02


class WireQueue:
    """Admits requests while less than `capacity` is inside; the rest wait, in weighted deficit round robin."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._inside = 0
        self._waiting: DeficitRoundRobin[asyncio.Future[None]] = DeficitRoundRobin()

    async def enter(
        self, flow: str, weight: float, size: int, longest_s: float, *, priority: int = 0
    ) -> Callable[[], None]:
        """Wait for a turn; call the result when it is over. In a flow, a higher priority has its turn first.

        One whose client is slow, or gone, has its turn for `longest_s` and no longer: it goes on, and another one too.
        """
        await self._wait(flow, weight, size, priority)
        has_left = False

        def leave() -> None:
            nonlocal has_left
            timer.cancel()
            if not has_left:
                has_left = True
                self._leave(size)

        timer = asyncio.get_running_loop().call_later(longest_s, leave)
        return leave

    async def _wait(self, flow: str, weight: float, size: int, priority: int) -> None:
        if self._inside < self._capacity and not len(self._waiting):
            self._inside += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.push(flow, weight, size, turn, priority=priority)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(size)
            raise

    def _leave(self, size: int) -> None:
        """Note that bytes have left the queue."""
        self._inside -= size
        while len(self._waiting) and self._inside < self._capacity:
            size, turn = self._waiting.pop()
            if not turn.done():
                self._inside += size
                turn.set_result(None)


class Wire:
    """The way out of this node. While one delivery has it alone nothing waits; several take turns by their rates."""

    def __init__(self, window_bytes: int) -> None:
        self._gate = WireQueue(window_bytes)
        self._lanes = 0

    def lane(self, name: str, weight: Callable[[], float]) -> Lane:
        """A delivery's place; close it at the end."""
        self._lanes += 1
        return Lane(self, name, weight)

    @property
    def contended(self) -> bool:
        return self._lanes > 1

    async def enter(self, flow: str, weight: float, size: int) -> Callable[[], None]:
        """Wait for a turn; call the result when the bytes have arrived."""
        return await self._gate.enter(flow, weight, size, _SLOW_S)

    def closed(self) -> None:
        """One of its lanes is."""
        self._lanes -= 1


class Lane:
    """Made by `Wire.lane`. `weight` is called at every turn: rates change."""

    def __init__(self, wire: Wire, name: str, weight: Callable[[], float]) -> None:
        self._wire = wire
        self._name = name
        self._weight = weight
        self._open = True

    async def turn(self, size: int) -> Callable[[], None] | None:
        """Wait for the wire; what to call when the bytes have arrived, or None if it need not be known."""
        if not self._wire.contended:
            return None
        return await self._wire.enter(self._name, max(1.0, self._weight()), size)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._wire.closed()
