"""Drives in memory that behave as badly as real ones: what is not synced may be lost, in part, at any sector.

The `Drives` and `BlockIO` ports in one. Bytes move when an operation ends, not when it is issued. Reads see what was
written; `crash()` keeps what was synced, and of everything written since then a random choice of 512-byte sectors, the
last of each write perhaps torn in the middle.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import itertools
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.model.iocb import Iocb, Op
from quire.testing.simulation.loop import SimulatedLoop
from quire_storage.errors import DriveUnusable
from quire_storage.ports import BlockIO

SECTOR = 512
_SIMULATED_FROM = 1 << 20
_DESCRIPTORS = itertools.count(_SIMULATED_FROM)


@dataclass(slots=True)
class _File:
    """`durable`: what survives for sure; `pending`: writes since the last sync, in order; `now`: what reads see."""

    durable: bytearray
    now: bytearray
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def write(self, offset: int, data: bytes) -> None:
        self.now[offset : offset + len(data)] = data
        self.pending.append((offset, data))

    def grow(self, size: int) -> None:
        for content in self.now, self.durable:  # sizes are in the journal of the file system
            content.extend(bytes(size - len(content)))

    def sync(self) -> None:
        for offset, data in self.pending:
            self.durable[offset : offset + len(data)] = data
        self.pending.clear()

    def crash(self, chance: random.Random) -> None:
        for offset, data in self.pending:
            for at in range(0, len(data), SECTOR):
                if chance.random() < 0.5:
                    continue
                size = len(data[at : at + SECTOR])
                if at + SECTOR >= len(data) and chance.random() < 0.5:
                    size = chance.randrange(size)  # torn
                self.durable[offset + at : offset + at + size] = data[at : at + size]
        self.pending.clear()
        self.now = bytearray(self.durable)


Fault = Callable[[Op, int, int, int], int | None]
"""(op, file, offset, length) → a negative errno or a number of bytes instead of doing it; None: do it."""


def no_fault(op: Op, file: int, offset: int, length: int) -> int | None:
    """Everything works."""
    return None


Redirect = Callable[[int, int, int, int], int]
"""(file, offset, length, size of the file) → where a write lands instead of at its offset."""


class SimDisk:
    """Files by drive name. `delay_s`: how long each batch takes. `redirect`: sends the next write elsewhere.

    `fail_at`: the machine dies at that operation (write, sync, rename), counted from 1.
    """

    direct = True
    name = "sim"
    description = "simulated drives"

    def __init__(self, seed: int = 0) -> None:
        self.files: dict[str, _File] = {}
        self.fault: Fault = no_fault
        self.redirect: Redirect | None = None
        self.fail_at: int | None = None
        self.delay_s = 0.0
        self.operations = 0
        self.dead = False
        self._chance = random.Random(seed)
        self._open: list[_File] = []
        self._done: list[Iocb] = []
        self._flying: dict[int, tuple[Iocb, list[tuple[int, int, int, int]]]] = {}
        self.latency_s: Callable[[], float] = lambda: 0.0
        self.event_fd = -1

    def crash(self) -> None:
        """Lose power; the next one to open the drives finds what was left. What was on its way may have arrived."""
        self.dead, self.fail_at = False, None
        for iocb, rows in self._flying.values():
            if iocb.op is Op.WRITE and self._chance.random() < 0.5:
                for row in rows:
                    self._do(iocb.op, *row)
        self._flying.clear()
        for file in self.files.values():
            file.crash(self._chance)
        self.dead, self.fail_at = False, None
        self._open, self._done = [], []

    def count(self) -> bool:
        """One more operation; whether the machine still lives."""
        self.operations += 1
        if self.fail_at is not None and self.operations >= self.fail_at:
            self.dead = True
        return not self.dead

    # ---- Drives

    def open(self, name: str) -> int | None:
        if name not in self.files:
            return None
        self._open.append(self.files[name])
        return len(self._open) - 1

    def create(self, name: str, size: int, head: bytes) -> int:
        fresh = _File(bytearray(size), bytearray(size))
        steps: list[Callable[[], None]] = [
            lambda: fresh.write(0, head),
            fresh.sync,
            lambda: self.files.update({name: fresh}),
        ]
        for step in steps:
            if not self.count():
                raise DriveUnusable("the machine died")
            step()
        self._open.append(fresh)
        return len(self._open) - 1

    def grow(self, file: int, size: int, page: bytes, at: int) -> None:
        pool = self._open[file]
        steps: list[Callable[[], None]] = [
            lambda: pool.grow(size),
            pool.sync,
            lambda: pool.write(at, page),
            pool.sync,
        ]
        for step in steps:
            if not self.count():
                raise DriveUnusable("the machine died")
            step()

    def head(self, file: int, length: int) -> bytes:
        return bytes(self._open[file].now[:length])

    def size(self, file: int) -> int:
        return len(self._open[file].now)

    # ---- BlockIO

    def __call__(self, name: str, depth: int, *, direct: bool) -> BlockIO:
        return self

    def init_queue(self, files: Sequence[int], memories: Sequence[npt.NDArray[np.uint8]]) -> None:
        try:
            simulated = isinstance(asyncio.get_running_loop(), SimulatedLoop)
        except RuntimeError:
            simulated = False
        self.event_fd = next(_DESCRIPTORS) if simulated else os.eventfd(0, os.EFD_NONBLOCK)

    def get_iocb(self) -> Iocb:
        return Iocb()

    def issue_io(self, iocb: Iocb) -> None:
        contexts = iocb.contexts
        rows = zip(
            contexts.files.tolist(),
            contexts.offsets.tolist(),
            contexts.lengths.tolist(),
            contexts.addresses.tolist(),
            strict=True,
        )
        self._flying[id(iocb)] = (iocb, list(rows))
        asyncio.get_running_loop().call_later(self.delay_s + self.latency_s(), self._complete, iocb)

    def _complete(self, iocb: Iocb) -> None:
        _, rows = self._flying.pop(id(iocb))
        iocb.results[:] = [self._do(iocb.op, *row) for row in rows]
        self._done.append(iocb)
        loop = asyncio.get_running_loop()
        if isinstance(loop, SimulatedLoop):
            loop.signal(self.event_fd)
        elif self.event_fd >= 0:
            os.eventfd_write(self.event_fd, 1)

    def wait_cqe(self) -> list[Iocb]:
        if self.event_fd < _SIMULATED_FROM:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.event_fd)
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        if 0 <= self.event_fd < _SIMULATED_FROM:
            os.close(self.event_fd)
        self.event_fd = -1

    def _do(self, op: Op, file: int, offset: int, length: int, address: int) -> int:
        if op is not Op.READ and not self.count():
            return -errno.EIO
        if self.dead:
            return -errno.EIO
        injected = self.fault(op, file, offset, length)
        if injected is not None and injected < 0:
            return injected
        each = self._open[file]
        if op is Op.SYNC:
            each.sync()
            return 0
        size = length if injected is None else injected
        assert offset >= 0 and offset + length <= len(each.now), "the engine stays within its files"
        if op is Op.READ:
            ctypes.memmove(address, bytes(each.now[offset : offset + size]), size)
        else:
            if self.redirect is not None:
                offset, self.redirect = self.redirect(file, offset, length, len(each.now)), None
            each.write(offset, ctypes.string_at(address, size))
        return size
