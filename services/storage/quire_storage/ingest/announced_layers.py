"""Layers that clients have announced, waited for by stores. Bounded: an announcement may come before its store."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from quire.model.errors import DeadlineExceeded, QuireError

_TRANSFERS_MAX = 4096


class AnnouncedLayers:
    """Number of announced layers, by transfer. Layers are produced in order."""

    def __init__(self) -> None:
        self._layers: OrderedDict[bytes, set[int]] = OrderedDict()
        self._failures: dict[bytes, QuireError] = {}
        self._waiters: dict[bytes, asyncio.Event] = {}

    def announce(self, transfer: bytes, layer: int) -> None:
        self._layers.setdefault(transfer, set()).add(layer)
        self._wake(transfer)
        while len(self._layers) > _TRANSFERS_MAX:
            self._layers.popitem(last=False)

    def fail(self, transfer: bytes, error: QuireError) -> None:
        """End the transfer of a client that disconnected: waiters for its layers get `error`."""
        self._failures[transfer] = error
        self._wake(transfer)

    def forget(self, transfer: bytes) -> None:
        self._layers.pop(transfer, None)
        self._failures.pop(transfer, None)
        self._waiters.pop(transfer, None)

    async def wait(self, transfer: bytes, layer: int, timeout_s: float) -> None:
        """Return when the layer is there. Raises `DeadlineExceeded`, or what `fail` was given."""
        event = self._waiters.setdefault(transfer, asyncio.Event())
        try:
            async with asyncio.timeout(timeout_s):
                while layer not in self._layers.get(transfer, ()):
                    if transfer in self._failures:
                        raise self._failures[transfer]
                    event.clear()
                    await event.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"the client did not produce layer {layer} within {timeout_s:.1f} s") from None

    def _wake(self, transfer: bytes) -> None:
        if (event := self._waiters.get(transfer)) is not None:
            event.set()
