"""Connections between services, where the other end is slow."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.model.errors import Unavailable
from quire.wire.channels import ChannelPool, call

_SERVER = """
import asyncio
import grpc
from grpc_health.v1 import health, health_pb2_grpc

async def main():
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()

asyncio.run(main())
"""


@contextlib.contextmanager
def _server() -> Iterator[tuple[int, int]]:
    """Process and port of a server of gRPC."""
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


async def test_a_server_may_take_a_second_to_answer_a_connection() -> None:
    # The kernel accepts the connection of a process that has no processor; HTTP/2's first frame comes when it has one.
    with _server() as (process, port):
        for tries_left in (2, 1, 0):  # gRPC gives up after three seconds: this machine may be that late
            os.kill(process, signal.SIGSTOP)
            asyncio.get_running_loop().call_later(0.7, os.kill, process, signal.SIGCONT)
            channels = ChannelPool()
            try:
                stub: Any = health_pb2_grpc.HealthStub(channels.get(f"127.0.0.1:{port}"))
                answer = await call(stub.Check, health_pb2.HealthCheckRequest(), timeout_s=30, again=False)
                break
            except Unavailable:
                if not tries_left:
                    raise
            finally:
                await channels.close()
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_stub_is_kept_as_long_as_its_channel() -> None:
    with _server() as (_, port):
        channels, address = ChannelPool(), f"127.0.0.1:{port}"
        stub: Any = channels.stub(health_pb2_grpc.HealthStub, address)
        assert channels.stub(health_pb2_grpc.HealthStub, address) is stub
        assert channels.stub(health_pb2_grpc.HealthStub, f"localhost:{port}") is not stub
        await channels.close()
        reopened: Any = channels.stub(health_pb2_grpc.HealthStub, address)
        assert reopened is not stub
        try:
            answer = await call(reopened.Check, health_pb2.HealthCheckRequest(), timeout_s=30)
        finally:
            await channels.close()
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
