"""A killed peer costs its own transfers, in either direction, and nobody else anything."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pyucx import Context, Endpoint, Memory, OperationTimeout, PeerDied, RemoteMemory, UcxError, Worker

_PEER = Path(__file__).with_name("peer_process.py")
TRANSPORTS = ["tcp", "tcp,cma"]


class PeerProcess:
    """A child that runs `peer_process.py`."""

    def __init__(self, role: str, transport: str) -> None:
        command = [sys.executable, str(_PEER), role, transport]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self) -> list[object]:
        assert self.process.stdout is not None
        line: list[object] = json.loads(self.process.stdout.readline())
        return line

    def write(self, value: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_writer_survives_a_killed_receiver(transport: str) -> None:
    """kill -9 of the receiver in the middle of a stream raises PeerDied here, soon; a new peer is served."""
    source = np.ones(8 << 20, dtype=np.uint8)
    first, second = PeerProcess("receive", transport), PeerProcess("receive", transport)
    try:
        with Context(TLS=transport) as context:
            async with Worker(context) as worker:
                memory = context.register(source)
                endpoint, remote = await _connect(worker, memory, first)
                killer = asyncio.get_running_loop().call_later(0.3, first.kill)
                started = time.monotonic()
                with pytest.raises(UcxError) as raised:
                    while time.monotonic() < started + 15:
                        stream = endpoint.stream(memory, remote, 1)
                        await stream.send(0, memory.length, 0)
                        stream.announce(b"round")
                        await stream.drain(10)
                killer.cancel()
                assert isinstance(raised.value, PeerDied)
                assert endpoint.error is not None
                endpoint.abort()
                endpoint, remote = await _connect(worker, memory, second)
                await endpoint.put(memory, 0, 1 << 20, remote, 0, timeout_s=10)
                await endpoint.flush(10)
                memory.close()
    finally:
        first.kill()
        second.kill()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_receiver_survives_a_killed_writer(transport: str) -> None:
    """kill -9 of the writer in the middle of a stream: the receiver's own endpoint learns of it, and it goes on."""
    target = np.zeros(8 << 20, dtype=np.uint8)
    peer = PeerProcess("stream", transport)
    messages: asyncio.Queue[bytes] = asyncio.Queue()
    try:
        with Context(TLS=transport) as context:
            async with Worker(context) as worker:
                worker.on_message(1, messages.put_nowait)
                memory = context.register(target)
                endpoint, _ = await _connect(worker, memory, peer)
                endpoint.send(1, b"hello")
                async with asyncio.timeout(20):
                    while await messages.get() != b"round":
                        pass
                died: asyncio.Future[PeerDied] = asyncio.get_running_loop().create_future()
                endpoint.on_failure(died.set_result)
                peer.kill()
                async with asyncio.timeout(20):
                    assert isinstance(await died, PeerDied)
                endpoint.abort()
                loop = worker.connect(worker.address())
                loop.send(1, b"still here")
                async with asyncio.timeout(10):
                    while await messages.get() != b"still here":
                        pass
                memory.close()
    finally:
        peer.kill()


async def test_stopped_peer_is_a_timeout() -> None:
    """SIGSTOP raises nothing by itself: the deadline of the operation does."""
    source = np.ones(64 << 20, dtype=np.uint8)
    peer = PeerProcess("receive", "tcp")
    try:
        with Context(TLS="tcp") as context:
            async with Worker(context) as worker:
                memory = context.register(source)
                endpoint, remote = await _connect(worker, memory, peer)
                await endpoint.put(memory, 0, 4096, remote, 0, timeout_s=10)
                await endpoint.flush(10)
                peer.process.send_signal(signal.SIGSTOP)
                stream = endpoint.stream(memory, remote, 1)
                sender = asyncio.create_task(stream.send(0, 8 << 20, 0))
                await asyncio.sleep(0.2)
                with pytest.raises(OperationTimeout):
                    await stream.drain(0.5)
                sender.cancel()
                endpoint.abort()
                await asyncio.gather(sender, return_exceptions=True)
                memory.close()
    finally:
        peer.kill()


async def _connect(worker: Worker, memory: Memory, peer: PeerProcess) -> tuple[Endpoint, RemoteMemory]:
    address, remote_address, key = await asyncio.to_thread(peer.read)
    peer.write([worker.address().hex(), memory.address, memory.remote_key.hex()])
    endpoint = worker.connect(bytes.fromhex(str(address)))
    return endpoint, endpoint.remote_memory(int(str(remote_address)), 8 << 20, bytes.fromhex(str(key)))
