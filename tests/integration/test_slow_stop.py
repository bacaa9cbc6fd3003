"""A stop that takes long says what it waits for."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from quire_server import grpc_server as module
from quire_server.grpc_server import until_signalled


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """As they were before."""
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(each) for each in kinds]
    yield
    for each, handler in zip(kinds, before, strict=True):
        signal.signal(each, handler)


async def _wait_in_vain(never: asyncio.Event) -> None:
    await never.wait()


async def test_a_stop_that_takes_long_says_where_its_tasks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLOW_STOP_S", 0.05)
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *_, **__: None)
    never = asyncio.Event()
    vain = [asyncio.create_task(_wait_in_vain(never)) for _ in range(3)]
    waiting = asyncio.create_task(until_signalled(30))
    await asyncio.sleep(0.05)
    with capture_logs() as logs:
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await waiting == "SIGTERM"
            while not logs:
                await asyncio.sleep(0.02)
    for each in vain:
        each.cancel()
    (told,) = logs
    assert "takes long" in told["event"]
    (place,) = (each for each in told["waiting"] if "_wait_in_vain" in each)
    assert place.startswith("3 × Event.wait"), told
