"""A service that cannot start ends, whatever still runs in it."""

from __future__ import annotations

import os
import subprocess
import sys

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


def test_it_ends_though_a_task_goes_on() -> None:
    environment = {**os.environ, "QUIRE_CLUSTER_SECRET": "5" * 32, "QUIRE_GATEWAY_METRICS_LISTEN": ""}
    command = [sys.executable, "-c", _CANNOT_START]
    done = subprocess.run(command, env=environment, timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "cannot listen on" in done.stderr
