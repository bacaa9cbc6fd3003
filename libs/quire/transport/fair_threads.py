"""Threads at which tenants take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Generic, TypeVar

from quire.model.fair_queue import FairQueue

Result = TypeVar("Result")


class _Job(Generic[Result]):
    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self.future: Future[Result] = Future()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._work()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class FairThreads:
    """The threads of an executor. A tenant with much work delays the next job of another by the jobs that run."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = threading.Lock()
        self._queue: FairQueue[_Job[Any]] = FairQueue()

    def submit(self, tenant: str, work: Callable[[], Result]) -> Future[Result]:
        """Run `work` when it is the tenant's turn. Raises `RuntimeError` after the executor was shut down."""
        job = _Job(work)
        with self._lock:
            self._queue.add(tenant, job)
        try:
            self._executor.submit(self._run_next)
        except RuntimeError:
            with self._lock:
                self._queue.remove(tenant, job)
            raise
        return job.future

    def _run_next(self) -> None:
        with self._lock:
            job = self._queue.take()
        job.run()
