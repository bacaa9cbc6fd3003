"""Threads at which tenants take turns."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.transport.fair_threads import FairThreads


def test_a_job_waits_for_those_that_run_alone() -> None:
    executor, gate, order = ThreadPoolExecutor(1), threading.Event(), list[str]()
    threads = FairThreads(executor)
    threads.submit("greedy", lambda: gate.wait(10))
    jobs = [threads.submit("greedy", lambda: order.append("greedy")) for _ in range(20)]
    jobs.append(threads.submit("modest", lambda: order.append("modest")))
    gate.set()
    for job in jobs:
        job.result(10)
    assert order.index("modest") <= 1
    executor.shutdown()


def test_errors_and_results_are_the_jobs_own() -> None:
    executor, gate = ThreadPoolExecutor(1), threading.Event()
    threads = FairThreads(executor)
    threads.submit("a", lambda: gate.wait(10))
    cancelled = threads.submit("a", lambda: 1)
    assert cancelled.cancel()
    failing, right = threads.submit("a", lambda: 1 // 0), threads.submit("a", lambda: 7)
    gate.set()
    with pytest.raises(ZeroDivisionError):
        failing.result(10)
    assert right.result(10) == 7
    executor.shutdown()
    with pytest.raises(RuntimeError):
        threads.submit("a", lambda: 8)
