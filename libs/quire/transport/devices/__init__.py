"""Copies between an engine's memory and host memory, as a port: on a stream of their own, ordered by events.

Laws that every implementation keeps, and `quire.testing.contracts.CopyStreamContract` checks: copies of a stream run in
their order, and after the event that they were submitted with; an event has passed when all work in front of it has
run; work that the engine begins after `order` runs after the event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Return whether all work before it has run."""

    def synchronize(self) -> None:
        """Block this thread until all work before it has run."""


class CopyStream(Protocol):
    """Copies of one engine. Safe from any thread, but `record` and `order` mean the current stream of their thread."""

    def pin(self, memory: Bytes) -> None:
        """Lock host memory in place, for copies without the processor; where that fails, copies are slower."""

    def record(self) -> Event:
        """Return an event behind all work that the engine has begun."""

    def submit(self, copies: Callable[[], None], dependency: Event | None = None) -> Event:
        """Begin copies, after the event `dependency` of the engine's stream; return the event behind them.

        `copies` begins them with torch, in this thread. Host memory in them is kept, and left alone, until the event.
        """

    def order(self, event: Event) -> None:
        """Have work that the engine begins from now on run after `event`. Does not block."""


class _Passed:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


PASSED = _Passed()
"""Event of work that has run."""


class HostStream:
    """Copies of an engine whose memory is the host's: they run at once."""

    def pin(self, memory: Bytes) -> None:
        """Do nothing: copies are by the processor."""

    def record(self) -> Event:
        return PASSED

    def submit(self, copies: Callable[[], None], dependency: Event | None = None) -> Event:
        copies()
        return PASSED

    def order(self, event: Event) -> None:
        """Do nothing: the copies have run."""


def copy_stream(device: Any) -> CopyStream:
    """Return the stream of copies for a torch device."""
    if device.type != "cuda":
        return HostStream()
    from quire.transport.devices.cuda import CudaStream

    return CudaStream(device)
