"""A stop that takes long says what it waits for; a start that fails ends, whatever still runs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
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


_CANNOT_START = """
import asyncio
from quire.model.errors import ConfigInvalid
from quire_gateway.config import GatewayConfig
from quire_server.service import run_service

async def goes_on_once() -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:  # as a cancellation that asyncio.wait_for loses
        await asyncio.Event().wait()

async def serve(config: GatewayConfig) -> None:
    serve.task = asyncio.create_task(goes_on_once())
    await asyncio.sleep(0)
    raise ConfigInvalid("cannot listen on 127.0.0.1:7410")

run_service("gateway", GatewayConfig, "QUIRE_GATEWAY_", serve)
"""


def test_a_service_that_cannot_start_ends_though_a_task_goes_on() -> None:
    environment = {**os.environ, "QUIRE_CLUSTER_SECRET": "5" * 32, "QUIRE_GATEWAY_METRICS_LISTEN": ""}
    command = [sys.executable, "-c", _CANNOT_START]
    done = subprocess.run(command, env=environment, timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "cannot listen on" in done.stderr
