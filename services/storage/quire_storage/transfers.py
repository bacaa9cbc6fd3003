"""Which transfers may touch clients' memory now, and which never will.

A gateway whose client has aborted a transfer stops it here: one that runs ends, one that has not come yet is refused
when it comes. So the client's memory is its own again as soon as this is answered, and not when the permit ends.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.model.errors import PeerLost, TransferRunning
from quire_storage.ports import Clock

TransferName = tuple[bytes, int]
"""A transfer's id, and which of its nodes this is."""


@dataclass(slots=True)
class _Running:
    """`stop`: what ends it, once that is known."""

    stop: Callable[[], None] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Transfers:
    """By name, from before their first byte until nothing of them is in flight."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._running: dict[TransferName, _Running] = {}
        self._refused: OrderedDict[TransferName, float] = OrderedDict()  # about in the order of their ends

    def begin(self, name: TransferName, what: str) -> None:
        """Raises `TransferRunning` for one of that name that is in flight, `PeerLost` for one that was stopped."""
        self._forget()
        if name in self._refused:
            raise PeerLost(f"this {what} was stopped before it began")
        if name in self._running:
            raise TransferRunning(f"a {what} of this id is running", field=f"{what}_id")
        self._running[name] = _Running()

    def stop_by(self, name: TransferName, stop: Callable[[], None]) -> None:
        """What ends it early. Called at once if that was wanted already."""
        self._running[name].stop = stop
        if name in self._refused:
            stop()

    def end(self, name: TransferName) -> None:
        """Nothing of it is in flight."""
        if (running := self._running.pop(name, None)) is not None:
            running.ended.set()

    async def stop(self, name: TransferName, refuse_s: float) -> None:
        """End a transfer, and refuse one of that name for so long. Returns when nothing of it is in flight."""
        self._refused[name] = self._clock.monotonic_s() + refuse_s
        running = self._running.get(name)
        if running is not None:
            if running.stop is not None:
                running.stop()
            await running.ended.wait()

    def _forget(self) -> None:
        now_s = self._clock.monotonic_s()
        while self._refused and next(iter(self._refused.values())) <= now_s:
            self._refused.popitem(last=False)
