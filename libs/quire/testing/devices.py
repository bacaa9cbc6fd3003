"""A device that runs nothing before it has to: work without the event that it needs finds old bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.transport.devices import Event


@dataclass(frozen=True, slots=True)
class _Mark:
    """An event of a queue, behind its first `count` entries."""

    queue: LateQueue
    count: int

    def query(self) -> bool:
        if self.queue.is_queried:
            self.synchronize()
        return self.queue.run >= self.count

    def synchronize(self) -> None:
        self.queue.run_until(self.count)


class LateQueue:
    """Work of a stream, in its order. `run`: entries that have run; `is_queried`: a query runs the work before it."""

    def __init__(self, lock: Any) -> None:
        self._entries: list[Callable[[], object]] = []
        self.lock = lock
        self.run, self.is_queried = 0, True

    def add(self, work: Callable[[], object]) -> None:
        with self.lock:
            self._entries.append(work)

    def mark(self) -> Event:
        with self.lock:
            return _Mark(self, len(self._entries))

    def run_until(self, count: int) -> None:
        """Run the first `count` entries, as far as they have not run."""
        with self.lock:
            while self.run < count:
                self._entries[self.run]()
                self.run += 1

    def run_all(self) -> None:
        """Run all entries."""
        self.run_until(len(self._entries))


class LateDevice:
    """A `CopyStream` and the stream of its engine. Each runs only as far as a thread or the other stream waits for it.

    A stream that nothing waits for is behind by all of its work: a real device is now and then, this one always.
    """

    def __init__(self) -> None:
        lock = threading.RLock()
        self.engine, self.copies = LateQueue(lock), LateQueue(lock)

    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        """Do nothing: copies are by the processor."""

    def record(self) -> Event:
        return self.engine.mark()

    def submit(self, copies: Callable[[], None], dependency: Event | None = None) -> Event:
        with self.copies.lock:
            if dependency is not None:
                self.copies.add(dependency.synchronize)
            self.copies.add(copies)
            return self.copies.mark()

    def order(self, event: Event) -> None:
        self.engine.add(event.synchronize)
