"""The data plane on UCX. The only module that sees `pyucx`."""

from __future__ import annotations

import contextlib
import resource
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

import pyucx
from quire.model.descriptor import RdmaTarget
from quire.model.errors import ConfigInvalid, DeadlineExceeded, PeerLost, QuireError, ResourceExhausted, TargetInvalid
from quire.transport.base import PayloadStream, Peer, Region, Remote
from quire.transport.pages import anonymous_memory

_MESSAGE_ID: Final = 1
_FRAME: Final = struct.Struct("<3sBBI")
_FRAME_MAGIC: Final = b"QW1"
_TOGETHER: Final = tuple(
    frozenset((1, minor) for minor in minors) for minors in ((15, 16, 17, 18), (19, 21, 22, 23), (20, 21, 22, 23))
)
"""Versions of UCX that reach each other."""


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise errors of pyucx as errors of Quire."""
    try:
        yield
    except pyucx.UcxError as error:
        raise _translate(error) from error


def _translate(error: pyucx.UcxError) -> QuireError:
    match error:
        case pyucx.TargetOutOfRange() | pyucx.InvalidRemoteKey():
            return TargetInvalid(str(error), field="target")
        case pyucx.OperationTimeout():
            return DeadlineExceeded(str(error))
        case _:
            return PeerLost(str(error))


class UcxTransport:
    """UCX in the running loop. `config` are UCX settings, e.g. TLS="tcp"."""

    name = "ucx"
    proof = b""

    def __init__(self, **config: str) -> None:
        self._config = config
        self._peers: dict[bytes, UcxPeer] = {}
        self._handler: Callable[[bytes], None] = lambda message: None
        self._gathers = True
        self.description = f"ucx {'.'.join(map(str, pyucx.library.version))} ({pyucx.library.origin})"

    async def start(self) -> None:
        self._gathers = await pyucx.gathers_correctly()
        try:
            self._context = pyucx.Context(**self._config)
        except pyucx.OperationFailed as error:
            settings = " ".join(f"UCX_{name}={value}" for name, value in self._config.items()) or "its settings"
            raise ConfigInvalid(f"UCX cannot start with {settings}: {error}; `ucx_info -d` lists the devices") from None
        self._worker = pyucx.Worker(self._context)
        self._worker.start()
        self._worker.on_message(_MESSAGE_ID, lambda message: self._handler(message))
        self._address = _framed(self._worker.address())

    async def close(self) -> None:
        self._peers.clear()
        await self._worker.close()

    @property
    def address(self) -> bytes:
        return self._address

    def allocate(self, length: int) -> npt.NDArray[np.uint8]:
        """Allocate, on huge pages if there are some."""
        return np.frombuffer(anonymous_memory(length), dtype=np.uint8)

    def register(self, buffer: Any) -> Region:
        """Register memory in place. Raises `ResourceExhausted` for more than this process may pin."""
        try:
            return self._context.register(buffer)
        except pyucx.OperationFailed as error:
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            allowed = "without a limit" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
            raise ResourceExhausted(f"{error}; this process may pin {allowed} (ulimit -l)") from error

    def connect(self, address: bytes) -> Peer:
        peer = self._peers.get(address)
        if peer is None or peer.error is not None:
            with _translated():
                peer = UcxPeer(self._worker.connect(_unframed(address)), gathers=self._gathers)
            peer.on_failure(lambda _: self._forget(address))
            self._peers[address] = peer
        return peer

    def on_message(self, handler: Callable[[bytes], None]) -> None:
        self._handler = handler

    def expecting(self) -> AbstractContextManager[None]:
        return self._worker.expecting()

    def _forget(self, address: bytes) -> None:
        dead = self._peers.pop(address, None)
        if dead is not None:
            # UCX runs this from its error handler, where an endpoint must not be closed.
            self._worker.loop.call_soon(dead.abort)


def understands(ours: tuple[int, int], theirs: tuple[int, int]) -> bool:
    """Return whether two versions (major, minor) of UCX transfer bytes, whichever of them connects first.

    Tested over TCP with the builds of PyPI (`make test-ucx`). From 1.19 on UCX does not reach 1.18 and before, and 1.19
    not 1.20; the other way round some pairs work.
    """
    return ours == theirs or any(ours in together and theirs in together for together in _TOGETHER)


def reached_versions() -> list[str]:
    """Return the versions of UCX, as "1.22", that this one reaches."""
    ours = pyucx.library.version[:2]
    reached = {ours}.union(*(together for together in _TOGETHER if ours in together))
    return [f"{major}.{minor}" for major, minor in sorted(reached)]


def _framed(address: bytes) -> bytes:
    """UCX ends the process at an address that it does not understand: a damaged one must not get that far.

    Nor one of another UCX: 1.13 and 1.22 end each other with SIGSEGV.
    """
    return _FRAME.pack(_FRAME_MAGIC, *pyucx.library.version[:2], zlib.crc32(address)) + address


def _unframed(framed: bytes) -> bytes:
    """Unpack an address. Raises `TargetInvalid` for bytes that `_framed` has not made."""
    if len(framed) > _FRAME.size:
        magic, major, minor, crc = _FRAME.unpack_from(framed)
        address = framed[_FRAME.size :]
        if magic == _FRAME_MAGIC and zlib.crc32(address) == crc:
            if not understands(pyucx.library.version[:2], (major, minor)):
                version = ".".join(map(str, pyucx.library.version))
                raise TargetInvalid(
                    f"the other side has UCX {major}.{minor}, and this UCX {version}, which reaches "
                    f"{', '.join(reached_versions())} alone",
                    field="target.worker_address",
                )
            return address
    raise TargetInvalid("no address of a UCX worker", field="target.worker_address")


class UcxPeer:
    """An endpoint."""

    def __init__(self, endpoint: pyucx.Endpoint, *, gathers: bool) -> None:
        self._endpoint = endpoint
        self._gathers = gathers

    @property
    def error(self) -> PeerLost | None:
        return None if self._endpoint.error is None else PeerLost(str(self._endpoint.error))

    @property
    def reached(self) -> bool:
        return self._endpoint.reached

    def on_failure(self, callback: Callable[[PeerLost], None]) -> Callable[[], None]:
        return self._endpoint.on_failure(lambda error: callback(PeerLost(str(error))))

    def memory(self, remote: Remote) -> None:
        """Elsewhere, for all that is known."""

    async def remote(self, target: RdmaTarget) -> Remote:
        with _translated():
            return self._endpoint.remote_memory(target.address, target.length, target.remote_key)

    async def get(
        self, region: Region, offset: int, length: int, remote: Remote, remote_offset: int, *, timeout_s: float
    ) -> None:
        with _translated():
            await self._endpoint.get(
                cast(pyucx.Memory, region), offset, length, cast(pyucx.RemoteMemory, remote), remote_offset, timeout_s
            )

    def stream(self, region: Region, remote: Remote, tenant: str = "") -> PayloadStream:
        with _translated():
            stream = self._endpoint.stream(cast(pyucx.Memory, region), cast(pyucx.RemoteMemory, remote), _MESSAGE_ID)
        return UcxStream(stream, gathers=self._gathers)

    def send(self, message: bytes) -> None:
        with _translated():
            self._endpoint.send(_MESSAGE_ID, message)

    async def flush(self, timeout_s: float) -> None:
        with _translated():
            await self._endpoint.flush(timeout_s)

    async def settle(self, timeout_s: float) -> None:
        with _translated():
            await self._endpoint.settle(timeout_s)

    async def close(self) -> None:
        with _translated():
            await self._endpoint.close()

    def abort(self) -> None:
        self._endpoint.abort()


class UcxStream:
    """A `pyucx.Stream`; where this libucp gathers wrongly (1.13), slice by slice."""

    def __init__(self, stream: pyucx.Stream, *, gathers: bool) -> None:
        self._stream = stream
        self._gathers = gathers

    @property
    def bytes_posted(self) -> int:
        return self._stream.bytes_posted

    async def send(self, offset: int, length: int, remote_offset: int) -> None:
        with _translated():
            await self._stream.send(offset, length, remote_offset)

    async def gather(self, offsets: npt.NDArray[np.int64], length: int, remote_offset: int) -> None:
        with _translated():
            if self._gathers:
                await self._stream.gather(offsets, length, remote_offset)
            else:
                for index, offset in enumerate(offsets.tolist()):
                    await self._stream.send(offset, length, remote_offset + index * length)

    async def place(self, write: Callable[[], None], length: int) -> None:
        raise NotImplementedError("the memory is not this host's")

    def announce(self, message: bytes, then: Callable[[], None] | None = None) -> None:
        with _translated():
            self._stream.announce(message, then)

    async def drain(self, timeout_s: float) -> None:
        with _translated():
            await self._stream.drain(timeout_s)

    def stop(self) -> None:
        self._stream.stop()
