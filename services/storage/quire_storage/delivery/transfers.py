"""The transfers that may access clients' memory, and those that were stopped before they arrived.

A gateway whose client has aborted a transfer stops it here: a running transfer ends, one that arrives later is refused.
The client gets its memory back when `Stop` is answered, not when the permit ends.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from quire.model.errors import PeerLost, TransferRunning
from quire_storage.ports import Clock

TransferName = tuple[bytes, int]
"""A transfer's id, and which of its nodes this is."""

RETRY_S: Final = 0.1
"""Time after which a transfer that was refused for lack of room may be repeated."""


@dataclass(slots=True)
class _Running:
    """`stop`: the callback that ends it early; None until it is set."""

    stop: Callable[[], None] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Transfers:
    """Running transfers by name, from before the first byte until no byte is in flight."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._running: dict[TransferName, _Running] = {}
        self._refused: OrderedDict[TransferName, float] = OrderedDict()  # about in the order of their ends

    def begin(self, name: TransferName, kind: str) -> None:
        """Reserve a name. Raises `TransferRunning` if it is in flight, `PeerLost` if it was stopped."""
        self._forget()
        if name in self._refused:
            raise PeerLost(f"this {kind} was stopped before it began")
        if name in self._running:
            raise TransferRunning(f"a {kind} of this id is running", field=f"{kind}_id")
        self._running[name] = _Running()

    def stop_by(self, name: TransferName, stop: Callable[[], None]) -> None:
        """Set the callback that ends a transfer early; called at once if it was stopped before."""
        self._running[name].stop = stop
        if name in self._refused:
            stop()

    def end(self, name: TransferName) -> None:
        """No byte of it is in flight: release the name."""
        if (running := self._running.pop(name, None)) is not None:
            running.ended.set()

    async def stop(self, name: TransferName, refuse_s: float) -> None:
        """End a transfer, and refuse its name for `refuse_s` seconds. Returns when no byte of it is in flight."""
        self._forget()
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
