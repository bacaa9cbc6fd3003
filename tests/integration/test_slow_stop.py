"""A service says where its tasks are: when its stop takes long, and on SIGUSR1."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from quire_server import grpc_server as module
from quire_server.grpc_server import until_signalled


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """As they were before."""
    kinds = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(each) for each in kinds]
    yield
    for each, handler in zip(kinds, before, strict=True):
        signal.signal(each, handler)


async def _wait_in_vain(never: asyncio.Event) -> None:
    await never.wait()


async def _told_after(number: signal.Signals) -> tuple[MutableMapping[str, Any], asyncio.Task[str]]:
    """The first line that is logged after a signal, while a task waits in vain."""
    vain = asyncio.create_task(_wait_in_vain(asyncio.Event()))
    waiting = asyncio.create_task(until_signalled(30))
    await asyncio.sleep(0.05)
    with capture_logs() as logs:
        os.kill(os.getpid(), number)
        async with asyncio.timeout(10):
            while not logs:
                await asyncio.sleep(0.02)
    vain.cancel()
    return logs[0], waiting


def _shows_what_waits_in_vain(told: MutableMapping[str, Any]) -> bool:
    return any("Event.wait" in place and "_wait_in_vain" in place for place in told["waiting"])


async def test_a_stop_that_takes_long_says_where_its_tasks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLOW_STOP_S", 0.05)
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *_, **__: None)
    told, waiting = await _told_after(signal.SIGTERM)
    assert await waiting == "SIGTERM"
    assert "takes long" in told["event"]
    assert _shows_what_waits_in_vain(told), told


async def test_a_service_says_where_its_tasks_are_when_it_is_asked() -> None:
    told, waiting = await _told_after(signal.SIGUSR1)
    assert not waiting.done(), "it goes on"
    waiting.cancel()
    assert _shows_what_waits_in_vain(told), told
