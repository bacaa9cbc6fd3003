"""A stop that takes long says what it waits for."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from structlog.testing import capture_logs

from quire_server import grpc_server as module
from quire_server.grpc_server import until_signalled


async def _wait_in_vain(never: asyncio.Event) -> None:
    await never.wait()


async def test_a_stop_that_takes_long_says_where_its_tasks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLOW_STOP_S", 0.05)
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *_, **__: None)
    vain = asyncio.create_task(_wait_in_vain(asyncio.Event()))
    waiting = asyncio.create_task(until_signalled(30))
    await asyncio.sleep(0.05)
    with capture_logs() as logs:
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(10):
            await waiting
            while not logs:
                await asyncio.sleep(0.02)
    vain.cancel()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(name)
    (told,) = logs
    assert "takes long" in told["event"]
    assert any("Event.wait" in place and "_wait_in_vain" in place for place in told["waiting"]), told
