"""Shared memory between real processes: who is refused, what a client can do to a node that has mapped its memory."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.model.descriptor import RdmaTarget
from quire.model.errors import ConfigInvalid, PeerLost, TargetInvalid
from quire.transport import OFF, AutoTransport, SharedMemoryTransport, data_plane
from quire.transport.memory import MemoryTransport
from quire.transport.shared_memory import SharedRegion
from quire.transport.unix_socket import swept
from tests.polling import eventually

_BYTES = 8 << 20
_STRANGER = 65534
_CLIENT = """
import asyncio, os, sys
from pathlib import Path
from quire.transport import SharedMemoryTransport

async def main():
    transport = SharedMemoryTransport(Path(sys.argv[1]), [int(uid) for uid in sys.argv[4:]])
    os.setuid(int(sys.argv[3]))
    await transport.start()
    transport.on_message(lambda message: print(message.decode(), flush=True))
    memory = transport.allocate(int(sys.argv[2]))
    region = transport.register(memory)
    print(transport.address.hex(), region.address, region.remote_key.hex(), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


class _Client:
    """A process with memory that it shares."""

    def __init__(self, folder: Path, *uids: int, user: int = os.getuid()) -> None:
        command = [sys.executable, "-c", _CLIENT, str(folder), str(_BYTES), str(user), *map(str, uids)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        address, start, key = self.said().split()
        self.target = RdmaTarget(bytes.fromhex(address), int(start), _BYTES, bytes.fromhex(key))

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[SharedMemoryTransport]:
    transport = SharedMemoryTransport(tmp_path / "sockets")
    await transport.start()
    yield transport
    await transport.close()


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """That every user can use."""
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@pytest.fixture
def client(node: SharedMemoryTransport) -> Iterator[_Client]:
    client = _Client(node.folder)
    yield client
    client.stop()


def _mappings(*, collected: bool = True) -> int:
    """Of shared memory, in this process; as they are, or as they are once garbage was `collected`."""
    if collected:
        gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:quire")


async def test_a_client_that_is_killed_costs_its_own_transfers(node: SharedMemoryTransport, client: _Client) -> None:
    """The node notices at once, its copies end, and it unmaps the dead client's memory; other clients are served."""
    before = _mappings()
    other = _Client(node.folder)
    try:
        source = node.register(np.full(_BYTES, 7, dtype=np.uint8))
        peer, spared = node.connect(client.target.worker_address), node.connect(other.target.worker_address)
        stream = peer.stream(source, await peer.remote(client.target))
        fine = spared.stream(source, await spared.remote(other.target))
        lost: asyncio.Future[PeerLost] = asyncio.get_running_loop().create_future()
        peer.on_failure(lost.set_result)
        with pytest.raises(PeerLost):
            for number in range(10_000):
                await stream.send(0, _BYTES, 0)
                if number == 3:
                    client.process.send_signal(signal.SIGKILL)
        async with asyncio.timeout(20):
            assert isinstance(await lost, PeerLost)
        with contextlib.suppress(PeerLost):
            await stream.drain(5)
        await fine.send(0, _BYTES, 0)
        fine.announce(b"there")
        await fine.drain(5)
        assert other.said() == "there"
        del stream, fine, peer
        spared.abort()
        del spared
        await eventually(lambda: _mappings() == before)
    finally:
        other.stop()


async def test_a_client_that_is_stopped_holds_nobody_up(node: SharedMemoryTransport, client: _Client) -> None:
    """Copies and messages go on without it; it finds both when it runs again."""
    source = node.register(np.full(_BYTES, 7, dtype=np.uint8))
    peer = node.connect(client.target.worker_address)
    stream = peer.stream(source, await peer.remote(client.target))
    client.process.send_signal(signal.SIGSTOP)
    for number in range(2000):  # more than a socket holds
        await stream.send(0, 100, 0)
        stream.announce(b"%d" % number)
    await stream.drain(5)
    client.process.send_signal(signal.SIGCONT)
    heard = await asyncio.to_thread(lambda: [client.said() for _ in range(2000)])
    assert heard == [str(number) for number in range(2000)]
    await peer.flush(5)


async def test_a_client_that_is_stopped_before_it_hands_out_its_memory(
    node: SharedMemoryTransport, client: _Client
) -> None:
    client.process.send_signal(signal.SIGSTOP)
    peer = node.connect(client.target.worker_address)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(PeerLost, match="has not handed out"):
        patch.setattr("quire.transport.shared_memory._ASK_TIMEOUT_S", 0.2)
        await peer.remote(client.target)
    client.process.send_signal(signal.SIGCONT)
    assert (await peer.remote(client.target)).length == _BYTES


async def test_memory_goes_with_its_transport(tmp_path: Path) -> None:
    """At once: gigabytes must not wait for the collector."""
    before = _mappings()
    gc.disable()
    try:
        owner = data_plane(tmp_path)
        await owner.start()
        region = owner.register(owner.allocate(_BYTES))
        await owner.close()
        del owner, region
        assert _mappings(collected=False) == before
    finally:
        gc.enable()


async def test_its_owner_cannot_shrink_what_it_shares(node: SharedMemoryTransport) -> None:
    """The node would get SIGBUS. If the owner punches a hole, the node's next write fills it again."""
    owner = SharedMemoryTransport(node.folder)
    await owner.start()
    memory = owner.allocate(_BYTES)
    region = owner.register(memory)
    assert isinstance(region, SharedRegion) and region.sealed is not None
    for size in (0, _BYTES - 1, _BYTES + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(region.sealed.file, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(region.sealed.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    peer = node.connect(owner.address)
    target = RdmaTarget(owner.address, region.address, _BYTES, region.remote_key)
    stream = peer.stream(node.register(np.full(_BYTES, 7, dtype=np.uint8)), await peer.remote(target))
    region.sealed.madvise(mmap.MADV_REMOVE)
    assert not memory.any()
    await stream.send(0, _BYTES, 0)
    await stream.drain(5)
    assert (memory == 7).all()
    await owner.close()


def _plain_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(_BYTES)
        return os.dup(file.fileno())


def _sealed(seals: int, *, length: int = _BYTES, populated: bool = True, flags: int = 0) -> int:
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(file, length)
    if populated:
        os.pwrite(file, bytes(length), 0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


_BOTH = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_BAD_FILES = {
    "plain": (_plain_file, "no seals|not sealed"),
    "unsealed": (lambda: _sealed(0), "not sealed"),
    "may shrink": (lambda: _sealed(fcntl.F_SEAL_GROW), "not sealed"),
    "read only": (lambda: _sealed(_BOTH | fcntl.F_SEAL_WRITE), "not sealed"),
    "short": (lambda: _sealed(_BOTH, length=4096), "more than the 4096"),
    "empty": (lambda: _sealed(_BOTH, populated=False), "not populated"),
    "pipe": (lambda: os.pipe()[0], "no seals"),
}


@pytest.mark.parametrize("kind", _BAD_FILES)
async def test_only_sealed_and_populated_memory_is_mapped(node: SharedMemoryTransport, kind: str) -> None:
    """Whatever a client hands out: a file that could end or stall the node, or take memory in its name, is refused."""
    made, message = _BAD_FILES[kind]
    owner = SharedMemoryTransport(node.folder)
    await owner.start()
    region = owner.register(owner.allocate(_BYTES))
    assert isinstance(region, SharedRegion)
    sealed: Any = SimpleNamespace(file=made())
    region.sealed = sealed
    peer = node.connect(owner.address)
    with pytest.raises(TargetInvalid, match=message):
        await peer.remote(RdmaTarget(owner.address, region.address, _BYTES, region.remote_key))
    os.close(sealed.file)
    await owner.close()


async def test_memory_is_known_by_its_name_alone(node: SharedMemoryTransport) -> None:
    owner = SharedMemoryTransport(node.folder)
    await owner.start()
    region, other = owner.register(owner.allocate(_BYTES)), owner.register(np.zeros(100, dtype=np.uint8))
    peer = node.connect(owner.address)
    guessed = bytearray(region.remote_key)
    guessed[5] ^= 1
    for key in (bytes(guessed), other.remote_key, b"", region.remote_key[:-1]):
        with pytest.raises(TargetInvalid):
            await peer.remote(RdmaTarget(owner.address, region.address, 100, key or b"x"))
    for address, length in ((region.address - 1, 100), (region.address + _BYTES - 99, 100)):
        with pytest.raises(TargetInvalid):
            await peer.remote(RdmaTarget(owner.address, address, length, region.remote_key))
    region.close()
    await asyncio.sleep(0.05)
    with pytest.raises(TargetInvalid, match="does not know"):
        await peer.remote(RdmaTarget(owner.address, region.address, 100, region.remote_key))
    await owner.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start another user's process")
@pytest.mark.parametrize("known", [False, True])
async def test_another_user_is_refused_unless_it_is_named(public_folder: Path, known: bool) -> None:
    """By the kernel's word, not the client's."""
    node = SharedMemoryTransport(public_folder, [_STRANGER] if known else [])
    await node.start()
    client = _Client(public_folder, 0, user=_STRANGER)
    try:
        if known:
            peer = node.connect(client.target.worker_address)
            assert (await peer.remote(client.target)).length == _BYTES
        else:
            with pytest.raises(PeerLost, match=f"belongs to user {_STRANGER}"):
                node.connect(client.target.worker_address)
    finally:
        client.stop()
        await node.close()


async def test_an_address_names_a_socket_of_the_folder(node: SharedMemoryTransport) -> None:
    """Never another path: a node must not be made to talk to what listens elsewhere."""
    with pytest.raises(PeerLost, match="another host"):
        node.connect(SharedMemoryTransport(node.folder).address)
    odd = SharedMemoryTransport(node.folder)
    for name in (b"../../run/docker", b"/var/run/a.sock.", b"\0" * 16, b"a" * 15 + b"\xff"):
        odd._name = name
        with pytest.raises(TargetInvalid):
            node.connect(odd.address)


async def test_sockets_of_processes_that_were_killed_are_swept(node: SharedMemoryTransport, client: _Client) -> None:
    alive = _Client(node.folder)
    client.stop()
    for path in node.folder.iterdir():
        os.utime(path, (time.time() - 3600,) * 2)
    swept(node.folder)
    assert len(list(node.folder.iterdir())) == 2, "this process' and that of the one that lives"
    assert node.connect(alive.target.worker_address).error is None
    alive.stop()


async def test_why_not_is_said(tmp_path: Path) -> None:
    """Falls back to UCX, and says for what reason."""
    folder = tmp_path / "a"
    node = data_plane(folder)
    await node.start()
    try:
        for other, reason in (
            (data_plane(OFF), "does not use it"),
            (data_plane(tmp_path / "b"), "another host, or a folder that is not shared"),
        ):
            await _moves(node, other, None)
            assert reason in node.description
            await other.close()
        beside = data_plane(folder)
        await _moves(node, beside, np.zeros(4096, dtype=np.uint8))
        assert "not allocated by Quire" in node.description
        await beside.close()
        beside = data_plane(folder)
        await _moves(node, beside, None)
        assert "1 ranges by shared_memory; 3 ranges by ucx" in node.description
        await beside.close()
    finally:
        await node.close()


class _NoWay(MemoryTransport):
    """UCX in another network."""

    asked = 0

    def connect(self, address: bytes) -> Any:
        self.asked += 1
        raise PeerLost("unreachable")


async def test_who_cannot_be_reached_by_ucx_is_not_connected_to(tmp_path: Path) -> None:
    """UCX would end that process: shared memory is all that there is, and its failure costs that transfer only."""
    ways = [_NoWay(), _NoWay()]
    client = AutoTransport(ways[0], SharedMemoryTransport(tmp_path), wary=True)
    node = AutoTransport(ways[1], SharedMemoryTransport(tmp_path))
    await client.start()
    await node.start()
    client.connect(node.address)
    await _moves(node, client, None, start=False)
    with pytest.raises(PeerLost, match="shared memory only, and: the memory was not allocated by Quire"):
        await _moves(node, client, np.zeros(4096, dtype=np.uint8), start=False)
    assert (ways[0].asked, ways[1].asked) == (1, 0)
    told = client.address
    await node.close()
    await eventually(lambda: client.address != told)  # others are reached as ever
    await client.close()


async def test_a_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, it fails the start; else there is UCX."""
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigInvalid, match="no socket in"):
        await data_plane(file).start()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(file))
    node = data_plane()
    await node.start()
    assert node.shared is None and "no socket in" in node.description
    await node.close()


async def _moves(
    node: AutoTransport, other: AutoTransport, memory: np.ndarray[Any, Any] | None, *, start: bool = True
) -> None:
    if start:
        await other.start()
    target = other.allocate(4096) if memory is None else memory
    region = other.register(target)
    peer = node.connect(other.address)
    remote = await peer.remote(RdmaTarget(other.address, region.address, 4096, region.remote_key))
    stream = peer.stream(node.register(np.full(4096, 7, dtype=np.uint8)), remote)
    await stream.send(0, 4096, 0)
    stream.announce(b"")
    await stream.drain(10)
    assert (target == 7).all()
    remote.close()
