"""The ring: batches of reads and writes to the drives, reads first."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.model.iocb import CONTEXTS_MAX, Contexts, Iocb, Op
from quire.telemetry import counter, logger, names
from quire_storage.core.slack import SlackLimits, WriteGate
from quire_storage.errors import DriveFailed
from quire_storage.ports import BlockIO, Clock

_CONTEXT_BYTES_MAX = 1 << 20
_LOOK_AGAIN_S = 0.005


@dataclass(slots=True)
class _Write:
    """Writes that wait: how many remain, and the future that ends with the last."""

    contexts: Contexts
    ends: npt.NDArray[np.int64]  # cumulated bytes
    issued: int
    since_s: float
    done: asyncio.Future[None]
    left: int = 0
    error: DriveFailed | None = None


class Ring:
    """Owns a `BlockIO`. For one event loop. Reads go at once; writes when the gate has room for them.

    Memory that a batch names is the ring's until the call returns, whatever happens to the caller: a cancelled caller
    is held back until the drives have let go.
    """

    def __init__(self, io: BlockIO, clock: Clock, limits: SlackLimits, *, slack: bool = True) -> None:
        self._io = io
        self._clock = clock
        self._limits = limits
        self._gate = WriteGate(limits, enabled=slack)
        self._iocbs: dict[int, tuple[Iocb, Any]] = {}
        self._writes: deque[_Write] = deque()
        self._backlog_bytes = 0
        self._room_waiters: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._on_read_failed: Callable[[DriveFailed], None] = lambda problem: None
        self.errors_by_file: dict[int, int] = {}
        self._failures = counter(names.DRIVE_ERRORS, "1", "reads and writes that a drive failed")

    @property
    def description(self) -> str:
        return self._io.description

    async def start(self, files: Sequence[int], memories: Sequence[npt.NDArray[np.uint8]]) -> None:
        """`files` are file descriptors; contexts name them by index. `memories`: where most bytes will lie."""
        self._io.init_queue(files, memories)
        asyncio.get_running_loop().add_reader(self._io.event_fd, self._completed)

    async def close(self) -> None:
        while self._iocbs or self._writes:
            await self._clock.sleep(0.002)
        if self._timer is not None:
            self._timer.cancel()
        asyncio.get_running_loop().remove_reader(self._io.event_fd)
        self._io.close()

    def on_read_failed(self, callback: Callable[[DriveFailed], None]) -> None:
        """Call `callback` with each read that a drive failed."""
        self._on_read_failed = callback

    async def read(self, contexts: Contexts, due_s: float = 0.0) -> DriveFailed | None:
        """Fill memory from the drives; `due_s`: when the consumer needs it (monotonic), 0 for now.

        Returns:
            The error of a drive that failed some of it, or None. Memory that was not filled fails its checksum;
            this error alone distinguishes corrupt bytes from unread ones.
        """
        number = self._gate.read_started(contexts.bytes, due_s, self._clock.monotonic_s())
        try:
            await self._run(Op.READ, contexts.split(_CONTEXT_BYTES_MAX))
            return None
        except DriveFailed as problem:
            self._on_read_failed(problem)
            return problem
        finally:
            self._gate.read_finished(number, self._clock.monotonic_s())
            self._pump()

    async def write(self, contexts: Contexts, *, at_once: bool = False) -> None:
        """Write, when reads leave room. Raises `DriveFailed`. Waits first while the backlog is at its bound.

        `at_once`: a few pages that are waited for, which need not wait for room.
        """
        loop = asyncio.get_running_loop()
        if at_once:
            await self._run(Op.WRITE, contexts)
            return
        while self._backlog_bytes > 2 * self._limits.backlog_bytes_max:
            turn = loop.create_future()
            self._room_waiters.append(turn)
            await turn
        pieces = contexts.split(min(_CONTEXT_BYTES_MAX, self._limits.quantum_bytes))
        job = _Write(pieces, np.cumsum(pieces.lengths), 0, self._clock.monotonic_s(), loop.create_future())
        self._writes.append(job)
        self._backlog_bytes += int(job.ends[-1])
        self._pump()
        await _to_the_end(job.done)
        if job.error is not None:
            raise job.error

    async def sync(self, files: Sequence[int]) -> None:
        """Sync: writes to `files` before it survive a loss of power. Raises `DriveFailed`."""
        await self._run(Op.SYNC, Contexts.of_files(list(files)))

    # ----

    async def _run(self, op: Op, contexts: Contexts) -> None:
        """Everything at once. Raises `DriveFailed`."""
        futures = []
        for start in range(0, len(contexts), CONTEXTS_MAX):
            done = asyncio.get_running_loop().create_future()
            self._issue(op, contexts.part(start, start + CONTEXTS_MAX), done)
            futures.append(done)
        problems = [problem for problem in await _to_the_end(asyncio.gather(*futures)) if problem is not None]
        if problems:
            raise problems[0].joined(problems[1:])

    def _issue(self, op: Op, contexts: Contexts, owner: Any) -> None:
        iocb = self._io.get_iocb()
        iocb.fill(op, contexts)
        self._iocbs[id(iocb)] = (iocb, owner)
        self._io.issue_io(iocb)

    def _completed(self) -> None:
        for iocb in self._io.wait_cqe():
            _, owner = self._iocbs.pop(id(iocb))
            problem = self._problem(iocb)
            if isinstance(owner, _Write):
                self._wrote(owner, iocb, problem)
            elif not owner.done():
                owner.set_result(problem)
        if self._writes:
            self._pump()

    def _problem(self, iocb: Iocb) -> DriveFailed | None:
        failed = iocb.failed()
        if not len(failed):
            return None
        files = iocb.contexts.files[failed].tolist()
        for file in files:
            self.errors_by_file[file] = self.errors_by_file.get(file, 0) + 1
        self._failures.add(len(failed))
        first = int(failed[0])
        file, offset = int(iocb.contexts.files[first]), int(iocb.contexts.offsets[first])
        problem = f"drive {file} at {offset}: {iocb.why(first)}"
        logger().error("a drive failed", op=iocb.op.name, contexts=len(failed), first=problem)
        return DriveFailed(f"{iocb.op.name.lower()}: {problem}", frozenset(files))

    def _wrote(self, job: _Write, iocb: Iocb, problem: DriveFailed | None) -> None:
        self._gate.write_finished(iocb.contexts.bytes)
        job.left -= 1
        if problem is not None:
            job.error = problem.joined([job.error] if job.error else [])
        if job.left == 0 and job.issued == len(job.contexts) and not job.done.done():
            job.done.set_result(None)

    def _pump(self) -> None:
        """Issue writes as far as the gate lets them, and look again soon if some are left."""
        while self._writes:
            job, now_s = self._writes[0], self._clock.monotonic_s()
            room = self._gate.room(now_s, self._backlog_bytes, job.since_s)
            previous_end = int(job.ends[job.issued - 1]) if job.issued else 0
            stop = int(np.searchsorted(job.ends, previous_end + room, side="right"))
            stop = min(stop, job.issued + CONTEXTS_MAX)
            if stop <= job.issued:
                break
            part = job.contexts.part(job.issued, stop)
            job.issued = stop
            job.left += 1
            self._backlog_bytes -= part.bytes
            if job.issued == len(job.contexts):
                self._writes.popleft()
            self._gate.write_started(part.bytes, now_s)
            self._issue(Op.WRITE, part, job)
        while self._room_waiters and self._backlog_bytes <= 2 * self._limits.backlog_bytes_max:
            if not (turn := self._room_waiters.popleft()).done():
                turn.set_result(None)
                break
        if self._writes and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._pump()


async def _to_the_end(future: asyncio.Future[Any]) -> Any:
    """The result; a cancellation is kept until there is one, because the drives still use the caller's memory."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return future.result()
