"""The data plane inside one process: numpy copies. For tests of what stands above the port."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quire.model.descriptor import RdmaTarget
from quire.model.errors import PeerLost, TargetInvalid
from quire.transport.base import PayloadStream, Peer, Region, Remote

Bytes = npt.NDArray[np.uint8]


class MemoryRegion:
    """Registered memory; `view` is a flat array of its bytes."""

    _keys = itertools.count(1)
    by_key: ClassVar[dict[bytes, MemoryRegion]] = {}

    def __init__(self, buffer: Any) -> None:
        array = buffer.numpy() if hasattr(buffer, "numpy") else np.asarray(buffer)
        self.view: Bytes = array.reshape(-1).view(np.uint8)
        self.address = int(self.view.ctypes.data)
        self.length = self.view.nbytes
        self.remote_key = b"memory%d" % next(self._keys)
        self.by_key[self.remote_key] = self

    def close(self) -> None:
        self.by_key.pop(self.remote_key, None)


class MemoryRemote:
    """A window of a region."""

    def __init__(self, region: MemoryRegion, target: RdmaTarget) -> None:
        start = target.address - region.address
        if start < 0 or start + target.length > region.length:
            raise TargetInvalid("outside of the registered range", field="target")
        self.view = region.view[start : start + target.length]
        self.length = target.length

    def window(self, offset: int, length: int) -> Bytes:
        """Bytes of it. Raises `TargetInvalid`."""
        if offset < 0 or offset + length > self.length:
            raise TargetInvalid(f"[{offset}, {offset + length}) is outside of {self.length} bytes", field="target")
        return self.view[offset : offset + length]

    def close(self) -> None:
        self.view = self.view[:0]
        self.length = 0


class MemoryTransport:
    """A member of an imaginary fabric. `kill()` makes it die as a process would."""

    name = "memory"
    proof = b""
    description = "memory of this process"
    _fabric: ClassVar[dict[bytes, MemoryTransport]] = {}
    _names = itertools.count(1)

    def __init__(self) -> None:
        self._address = b"memory://%d" % next(self._names)
        self.handler: Callable[[bytes], None] = lambda message: None
        self.watchers: list[Callable[[PeerLost], None]] = []

    async def start(self) -> None:
        self._fabric[self._address] = self

    async def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        if self._fabric.pop(self._address, None) is not None:
            while self.watchers:  # one may take others back
                self.watchers.pop(0)(PeerLost("the peer died"))

    @property
    def address(self) -> bytes:
        return self._address

    def allocate(self, length: int) -> Bytes:
        return np.zeros(length, dtype=np.uint8)

    def register(self, buffer: Any) -> Region:
        return MemoryRegion(buffer)

    def connect(self, address: bytes) -> Peer:
        return MemoryPeer(self._fabric, address)

    def on_message(self, handler: Callable[[bytes], None]) -> None:
        self.handler = handler

    def expecting(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class MemoryPeer:
    """A connection to another member."""

    def __init__(self, fabric: dict[bytes, MemoryTransport], address: bytes) -> None:
        self._fabric = fabric
        self._address = address
        self._closed = False

    @property
    def error(self) -> PeerLost | None:
        return PeerLost("the peer died") if self._address not in self._fabric or self._closed else None

    @property
    def reached(self) -> bool:
        return True

    def peer(self) -> MemoryTransport:
        """The transport at the other end. Raises `PeerLost`."""
        if (error := self.error) is not None:
            raise error
        return self._fabric[self._address]

    def on_failure(self, callback: Callable[[PeerLost], None]) -> Callable[[], None]:
        if (error := self.error) is not None:
            callback(error)
            return lambda: None
        watchers = self.peer().watchers
        watchers.append(callback)
        return lambda: watchers.remove(callback) if callback in watchers else None

    def memory(self, remote: Remote) -> None:
        """Return None: bytes are copied, as by a wire."""

    async def remote(self, target: RdmaTarget) -> Remote:
        region = MemoryRegion.by_key.get(target.remote_key)
        if region is None:
            raise TargetInvalid("unknown key", field="target.remote_key")
        return MemoryRemote(region, target)

    async def get(
        self, region: Region, offset: int, length: int, remote: Remote, remote_offset: int, *, timeout_s: float
    ) -> None:
        assert isinstance(remote, MemoryRemote)
        self.peer()
        target = local_window(region, offset, length)
        target[:] = remote.window(remote_offset, length)
        await asyncio.sleep(0)

    def stream(self, region: Region, remote: Remote, tenant: str = "") -> PayloadStream:
        assert isinstance(remote, MemoryRemote)
        return MemoryStream(self, region, remote)

    def send(self, message: bytes) -> None:
        asyncio.get_running_loop().call_soon(self.peer().handler, message)

    async def flush(self, timeout_s: float) -> None:
        await asyncio.sleep(0)

    async def settle(self, timeout_s: float) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None:
        self._closed = True

    def abort(self) -> None:
        self._closed = True


class MemoryStream:
    """Copies at once; a yield after each put stands for the wire."""

    def __init__(self, peer: MemoryPeer, region: Region, remote: MemoryRemote) -> None:
        self._peer = peer
        self._region = region
        self._remote = remote
        self._stopped = False
        self.bytes_posted = 0

    async def send(self, offset: int, length: int, remote_offset: int) -> None:
        if self._stopped:
            raise PeerLost("the stream was stopped")
        self._peer.peer()
        window = self._remote.window(remote_offset, length)
        window[:] = local_window(self._region, offset, length)
        self.bytes_posted += length
        await asyncio.sleep(0)

    async def gather(self, offsets: npt.NDArray[np.int64], length: int, remote_offset: int) -> None:
        self._remote.window(remote_offset, length * len(offsets))
        for offset in offsets.tolist():
            local_window(self._region, offset, length)
        for index, offset in enumerate(offsets.tolist()):
            await self.send(offset, length, remote_offset + index * length)

    async def place(self, write: Callable[[], None], length: int) -> None:
        raise NotImplementedError("the memory is not this host's")

    def announce(self, message: bytes, then: Callable[[], None] | None = None) -> None:
        if message:
            self._peer.send(message)
        if then is not None:
            then()

    async def drain(self, timeout_s: float) -> None:
        await asyncio.sleep(0)
        self._peer.peer()

    def stop(self) -> None:
        self._stopped = True


def local_window(region: Region, offset: int, length: int) -> Bytes:
    """Bytes of a region of one's own. Raises `TargetInvalid`."""
    assert isinstance(region, MemoryRegion)
    if offset < 0 or offset + length > region.length:
        raise TargetInvalid(f"[{offset}, {offset + length}) is outside of {region.length} bytes", field="source")
    return region.view[offset : offset + length]
