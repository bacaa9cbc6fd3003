"""A killed peer costs its own transfers, in either direction, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from pyucx import Context, Endpoint, Memory, OperationTimeout, PeerDied, RemoteMemory, UcxError, Worker
from tests.hosts import Hosts

_PEER = Path(__file__).with_name("peer_process.py")
TRANSPORTS = ["tcp", "tcp,cma"]


class PeerProcess:
    """A child that runs `peer_process.py`."""

    def __init__(self, role: str, transport: str, prefix: Sequence[str] = ()) -> None:
        command = [*prefix, sys.executable, str(_PEER), role, transport]
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


@contextlib.contextmanager
def _cut_short() -> Iterator[None]:
    """Connections that are begun inside are broken at the end, before they are made."""

    def sockets() -> set[int]:
        found = set()
        for each in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # another thread closed it
                if str(each.readlink()).startswith("socket:"):
                    found.add(int(each.name))
        return found

    before = sockets()
    yield
    begun = sockets() - before
    assert begun
    for each in begun:
        with socket.socket(fileno=os.dup(each)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
async def workers() -> AsyncIterator[tuple[Worker, Worker, Memory]]:
    """Two that know nothing of each other yet, and memory of both."""
    with Context(TLS="tcp") as context:
        async with Worker(context) as writer, Worker(context) as receiver:
            memory = context.register(np.ones(1 << 20, dtype=np.uint8))
            yield writer, receiver, memory
            memory.close()


async def test_a_connection_that_was_never_made_says_so(workers: tuple[Worker, Worker, Memory]) -> None:
    """The peer lives: one that has been reached and is lost is another matter."""
    writer, receiver, memory = workers
    with _cut_short():
        broken = writer.connect(receiver.address())
    broken.send(1, b"in vain")
    remote = broken.remote_memory(memory.address, memory.length, memory.remote_key)
    with pytest.raises(PeerDied):
        await broken.put(memory, 0, 4096, remote, 4096, timeout_s=10)
    assert broken.error is not None and not broken.reached
    remote.close()
    broken.abort()
    sound = writer.connect(receiver.address())
    await sound.flush(10)
    assert sound.reached
    await receiver.close()
    async with asyncio.timeout(10):
        while sound.error is None:
            await asyncio.sleep(0.01)
    assert sound.reached


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


async def test_a_host_that_is_switched_off_does_not_hold_up_the_loop(hosts: Hosts) -> None:
    """Connecting returns though nothing answers; transfers end at their deadline; the worker can be closed."""
    receiver = PeerProcess("receive", "tcp", hosts.on(1))
    writer = PeerProcess("put", "tcp", [*hosts.on(0), "env", "UCX_NET_DEVICES=eth0"])
    try:
        address = await asyncio.to_thread(receiver.read)
        await asyncio.to_thread(writer.read)
        hosts.run(f"ip -n {hosts.names[0]} neigh replace 10.217.0.2 lladdr 02:00:00:00:00:99 dev eth0")
        writer.write(address)
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(writer.read) == ["survived", "OperationTimeout", "never reached"]
        assert writer.process.wait(10) == 0
    finally:
        receiver.kill()
        writer.kill()


async def test_an_address_with_a_device_that_went_reaches_nothing(hosts: Hosts) -> None:
    """A peer's address names a device that is no more (of containers, of a VPN): connecting fails, though it lives."""
    hosts.add_device("br0")
    there = PeerProcess("receive", "tcp", [*hosts.on(0), "env", "UCX_NET_DEVICES=br0"])
    try:
        address = await asyncio.to_thread(there.read)
        hosts.remove_device("br0")
        here = PeerProcess("flush", "tcp", hosts.on(0))
        try:
            await asyncio.to_thread(here.read)
            here.write(address)
            async with asyncio.timeout(30):
                assert await asyncio.to_thread(here.read) == ["survived", "PeerDied", "never reached"]
        finally:
            here.kill()
    finally:
        there.kill()


async def _connect(worker: Worker, memory: Memory, peer: PeerProcess) -> tuple[Endpoint, RemoteMemory]:
    address, remote_address, key = await asyncio.to_thread(peer.read)
    peer.write([worker.address().hex(), memory.address, memory.remote_key.hex()])
    endpoint = worker.connect(bytes.fromhex(str(address)))
    return endpoint, endpoint.remote_memory(int(str(remote_address)), 8 << 20, bytes.fromhex(str(key)))
