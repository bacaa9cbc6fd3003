"""An asyncio loop on virtual time: waiting costs nothing, and a run with the same seed is the same run.

Randomness belongs into simulated I/O, drawn from `loop.random`; callbacks keep asyncio's first-in-first-out order. A
callback belongs to the simulated process in whose context it was made: those of a process that has crashed never run,
those of one that is paused run when it goes on.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
import selectors
from asyncio import events
from collections.abc import Callable, Coroutine
from typing import Any, Final


class Deadlock(RuntimeError):
    """Nothing is ready, no timer is set, and the main coroutine has not ended."""


class Process:
    """Something that crashes and pauses as a whole. `skew_ms`: how far its wall clock is off."""

    def __init__(self, name: str, *, skew_ms: int = 0) -> None:
        self.name = name
        self.skew_ms = skew_ms
        self.dead = False
        self.paused = False
        self.backlog: list[events.Handle] = []
        self._watchers: list[asyncio.Future[None]] = []
        self.tasks: set[asyncio.Task[Any]] = set()  # kept: what is collected as garbage runs its `finally` blocks

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something as this process."""
        context = contextvars.copy_context()
        context.run(_PROCESS.set, self)
        return asyncio.get_running_loop().create_task(coroutine, context=context)

    def crash(self) -> None:
        """Nothing of it runs ever again."""
        self.dead = True
        self.backlog.clear()
        self.wake()

    def wake(self) -> None:
        """Wake the callers that wait for a sign of life, after a moment."""
        loop, watchers = asyncio.get_running_loop(), self._watchers
        self._watchers = []
        for watcher in watchers:
            loop.call_later(_DEATH_SEEN_S, _set, watcher, context=contextvars.Context())

    async def changed(self) -> None:
        """Return a moment after the process has died, or called `wake`."""
        watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers.append(watcher)
        try:
            await watcher
        finally:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

    async def died(self) -> None:
        """Return a moment after the process has died."""
        if self.dead:
            await asyncio.sleep(_DEATH_SEEN_S)
        while not self.dead:
            await self.changed()

    def go_on(self) -> None:
        """After a pause."""
        self.paused = False
        backlog, self.backlog = self.backlog, []
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        loop.resume(backlog)


def _set(watcher: asyncio.Future[None]) -> None:
    if not watcher.done():
        watcher.set_result(None)


_DEATH_SEEN_S: Final = 0.05
_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def current_process() -> Process | None:
    """The process that runs now; None for the simulation itself."""
    return _PROCESS.get()


def _run(handle: Any, run: Callable[[Any], None]) -> None:
    process = handle._context.get(_PROCESS)
    if process is None or not (process.dead or process.paused):
        run(handle)
    elif not process.dead:
        process.backlog.append(handle)


class _Handle(events.Handle):
    __slots__ = ()

    def _run(self) -> None:
        _run(self, events.Handle._run)


class _TimerHandle(events.TimerHandle):
    __slots__ = ()

    def _run(self) -> None:
        _run(self, events.TimerHandle._run)


class _VirtualSelector(selectors.DefaultSelector):
    """Instead of blocking for `timeout`, moves the loop's clock on by it. Real descriptors are only polled."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return []
        if timeout is None:
            raise Deadlock("no callback is ready and no timer is set")
        self.now_s += timeout
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual.

    Executors run a call after a random delay, and deliver its result after another one. A call that has begun runs to
    its end, even if its future was cancelled.
    """

    def __init__(self, seed: int) -> None:
        self._virtual = _VirtualSelector()
        self._readers: dict[Any, _Handle] = {}
        super().__init__(self._virtual)
        self.random = random.Random(seed)
        self.graves: set[Process] = set()
        self.failures: list[dict[str, Any]] = []
        self.set_exception_handler(lambda loop, context: self.failures.append(context))

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        """A simulated descriptor: `signal` says that it is readable."""
        self._readers[fd] = _Handle(callback, args, self, None)

    def remove_reader(self, fd: Any) -> bool:
        return self._readers.pop(fd, None) is not None

    def signal(self, fd: int) -> None:
        """Call the readers of a simulated descriptor."""
        handle = self._readers.get(fd)
        if handle is not None:
            self._ready.append(handle)  # type: ignore[attr-defined]

    def create_task(self, coroutine: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        task = super().create_task(coroutine, name=name, context=context)
        process = context.get(_PROCESS) if context is not None else _PROCESS.get()
        if process is not None:
            process.tasks.add(task)
            task.add_done_callback(process.tasks.discard)
            task.add_done_callback(self._note_failure)
            self.graves.add(process)
        return task

    def _note_failure(self, task: asyncio.Task[Any]) -> None:
        """Whether anybody waits for the task or not: one that runs in the background would end unseen."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append({"exception": error})

    def time(self) -> float:
        return self._virtual.now_s

    def resume(self, handles: list[events.Handle]) -> None:
        """Run the deferred work of a paused process."""
        self._ready.extend(handles)  # type: ignore[attr-defined]

    def _call_soon(self, callback: Any, args: Any, context: Any) -> events.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> events.Handle:  # type: ignore[override]
        return self._call_soon(callback, args, context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> events.TimerHandle:
        timer = _TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *args: Any
    ) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self.create_future()

        def begin() -> None:
            if not future.cancelled():
                self.call_later(self.random.uniform(0.0, 100e-6), run)

        def run() -> None:
            try:
                result, error = func(*args), None
            except Exception as raised:
                result, error = None, raised
            self.call_later(self.random.uniform(0.0, 100e-6), tell, result, error)

        def tell(result: Any, error: Exception | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self.call_later(self.random.uniform(20e-6, 100e-6), begin)
        return future

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> events.Handle:  # type: ignore[override]
        """Simulated threads are callbacks of this loop."""
        return self._call_soon(callback, args, context)


def simulate(seed: int, main: Callable[[SimulatedLoop], Coroutine[Any, Any, Any]]) -> Any:
    """Run `main(loop)` to its end on a loop of its own."""
    loop = SimulatedLoop(seed)
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(main(loop))
    finally:
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        asyncio.set_event_loop(None)
        loop.close()


class VirtualTime:
    """Stands in for `time` where the client reads it."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def monotonic_ns(self) -> int:
        """Return the loop's time in ns, never 0."""
        return int(self._loop.time() * 1e9) + 1
