"""The data plane between processes of one host: memory that both have mapped, and messages by unix sockets.

`allocate` returns memory backed by an anonymous file (memfd) that is sealed against growing and shrinking. A peer
requests a region by its name, 128 random bits, over the owner's socket, and receives the file by SCM_RIGHTS. Both sides
check the other process' user first (SO_PEERCRED). The receiver checks the file's seals: if the owner could shrink the
file, the receiver would get SIGBUS at the next access. Threads copy; the thread that has copied sends the announcement.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import secrets
import socket
import stat
import struct
import tempfile
import weakref
import zlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import numpy as np
import numpy.typing as npt

from quire.model.descriptor import RdmaTarget
from quire.model.errors import ConfigInvalid, PeerLost, TargetInvalid
from quire.transport.base import PayloadStream, Peer, Region, Remote
from quire.transport.copying import CopyStream, to_its_end, window
from quire.transport.fair_threads import FairThreads
from quire.transport.liveness import Liveness
from quire.transport.unix_socket import Connection, Message, connected, listening, swept

Bytes = npt.NDArray[np.uint8]
_ADDRESS: Final = struct.Struct("<3s16sI")
_ADDRESS_MAGIC: Final = b"QS1"
_KEY: Final = struct.Struct("<3s16sI")
_KEY_MAGIC: Final = b"QK1"
_GRANT: Final = struct.Struct("<QQQQ")  # request, address of the region in its owner, where in the file, length
_NUMBER: Final = struct.Struct("<Q")
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_PAGE_MAX: Final = 64 << 10  # of huge pages a fault may end in SIGBUS
_MADV_POPULATE_WRITE: Final = 23
_REGIONS_MAX: Final = 256
_ASK_TIMEOUT_S: Final = 1.0
_THREADS_MAX: Final = 4
_libc: Final = ctypes.CDLL(None, use_errno=True)


def default_folder() -> Path:
    """Return the folder of the sockets of this user's processes, unless another one is named."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"quire-{os.getuid()}"


class _Sealed(mmap.mmap):
    """A mapping of a sealed memfd, and the memfd's descriptor. Zeroed; its size is fixed."""

    file: int
    address: int
    all: ClassVar[weakref.WeakSet[_Sealed]] = weakref.WeakSet()

    @classmethod
    def made(cls, length: int) -> _Sealed:
        file = os.memfd_create("quire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, length)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            memory = cls(file, length)
        except BaseException:
            os.close(file)
            raise
        memory.file = file
        memory.address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        weakref.finalize(memory, os.close, file)
        cls.all.add(memory)
        return memory

    @classmethod
    def around(cls, address: int, length: int) -> _Sealed | None:
        """The one that has all of these bytes."""
        inside = (
            block for block in cls.all if block.address <= address and address + length <= block.address + len(block)
        )
        return next(inside, None)


@dataclass(slots=True)
class _Grant:
    """A range that an owner has handed out: `length` bytes at `start` of a file, mapped at `address` there."""

    file: FileIO
    address: int
    start: int
    length: int


class SharedRegion:
    """Registered memory here. `name`: by which a peer may ask for it; none for memory that cannot be shared."""

    def __init__(self, transport: SharedMemoryTransport, view: Bytes, keep: Any) -> None:
        self.view = view
        self.address = int(view.ctypes.data)
        self.length = view.nbytes
        self.sealed = sealed = _Sealed.around(self.address, self.length)
        self._keep = keep
        self.name = secrets.token_bytes(16) if sealed is not None else b""
        self.remote_key = _framed(_KEY, _KEY_MAGIC, self.name) if self.name else b"unshared"
        self._transport = transport
        if sealed is not None:
            self.file_offset = self.address - sealed.address
            transport.regions[self.name] = self

    def close(self) -> None:
        self._transport.forget(self)


class SharedRemote:
    """A window of a peer's memory."""

    def __init__(self, view: Bytes) -> None:
        self.view = view
        self.length = view.nbytes

    def window(self, offset: int, length: int) -> Bytes:
        """Bytes of it. Raises `TargetInvalid`."""
        return window(self.view, offset, length, "target")

    def close(self) -> None:
        self.view = self.view[:0]
        self.length = 0


class SharedMemoryTransport:
    """A member. `folder`: of the sockets, the same for all of them. `uids`: other users to deal with."""

    name = "shared_memory"
    proof = b""

    def __init__(self, folder: Path | None = None, uids: Collection[int] = ()) -> None:
        self.folder = folder or default_folder()
        self._uids = frozenset((os.getuid(), *uids))
        self._name = secrets.token_bytes(8).hex().encode()
        self._handler: Callable[[bytes], None] = lambda message: None
        self.regions: dict[bytes, SharedRegion] = {}
        self._peers: dict[bytes, SharedPeer] = {}
        self._accepted: set[Connection] = set()
        self._listener: socket.socket | None = None
        self.description = f"shared memory ({self.folder})"

    async def start(self) -> None:
        """Listen. Raises `ConfigInvalid` for a folder that cannot be used."""
        self.loop = asyncio.get_running_loop()
        self.threads = ThreadPoolExecutor(min(_THREADS_MAX, os.cpu_count() or 1), thread_name_prefix="quire-copy")
        self.turns = FairThreads(self.threads)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.folder.stat().st_uid not in {*self._uids, 0}:
                raise ConfigInvalid(f"{self.folder} belongs to another user", field="shared_memory")
            swept(self.folder)
            self._listener = listening(self.folder / self._name.decode(), mode=0o666 if len(self._uids) > 1 else 0o600)
        except OSError as error:
            raise ConfigInvalid(f"no socket in {self.folder}: {error}", field="shared_memory") from None
        self.loop.add_reader(self._listener.fileno(), self._accept)

    async def close(self) -> None:
        if self._listener is not None:
            self.loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            (self.folder / self._name.decode()).unlink(missing_ok=True)
        for peer in list(self._peers.values()):
            peer.abort()
        for connection in list(self._accepted):
            connection.close()
        self.regions.clear()
        self.threads.shutdown(wait=False)

    @property
    def address(self) -> bytes:
        return _framed(_ADDRESS, _ADDRESS_MAGIC, self._name)

    def allocate(self, length: int) -> Bytes:
        """Memory that peers can map. Populated at once: it is this process' and no peer's that it is charged to."""
        memory = _Sealed.made(length)
        array: Bytes = np.frombuffer(memory, dtype=np.uint8)
        _populate(array)
        return array

    def register(self, buffer: Any) -> Region:
        return SharedRegion(self, _bytes_of(buffer), buffer)

    def connect(self, address: bytes) -> Peer:
        """Connect to a peer. Raises `PeerLost` if nothing listens in this folder, or another user's process."""
        peer = self._peers.get(address)
        if peer is None or peer.error is not None:
            name = _unframed(_ADDRESS, _ADDRESS_MAGIC, address, "target.worker_address").decode("ascii", "replace")
            if not all(character in "0123456789abcdef" for character in name):
                raise TargetInvalid("no address of shared memory", field="target.worker_address")
            peer = self._peers[address] = SharedPeer(self, connected(self.folder / name, self._uids))
            peer.on_failure(lambda _: self._forget(address))
        return peer

    def _forget(self, address: bytes) -> None:
        self._peers.pop(address, None)

    def on_message(self, handler: Callable[[bytes], None]) -> None:
        self._handler = handler

    def expecting(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def forget(self, region: SharedRegion) -> None:
        """Peers that have mapped it let go of it."""
        if self.regions.pop(region.name, None) is not None:
            for connection in self._accepted:
                connection.send(Message.DROP, region.name)

    # ---- what peers ask

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError, ConnectionError, PermissionError):
            peer, _ = self._listener.accept()
            connection = Connection(peer, self._uids)
            self._accepted.add(connection)
            connection.start(
                lambda kind, body, _: self._asked(connection, kind, body),
                lambda _: self._accepted.discard(connection),
            )

    def _asked(self, connection: Connection, kind: Message, body: bytes) -> None:
        if kind is Message.TELL:
            self._handler(body)
        elif kind is Message.ASK and len(body) == _NUMBER.size + 16:
            region = self.regions.get(body[_NUMBER.size :])
            (number,) = _NUMBER.unpack_from(body)
            if region is None or region.sealed is None:
                connection.send(Message.DENY, body[: _NUMBER.size])
            else:
                answer = _GRANT.pack(number, region.address, region.file_offset, region.length)
                connection.send(Message.GRANT, answer, region.sealed.file)


class SharedPeer:
    """A connection to another member, and what of its memory is mapped here."""

    def __init__(self, transport: SharedMemoryTransport, connection: Connection) -> None:
        self._transport = transport
        self._connection = connection
        self._mapped: dict[bytes, tuple[int, Bytes]] = {}
        self._asked: dict[int, asyncio.Future[_Grant]] = {}
        self._numbers = itertools.count(1)
        self._liveness = Liveness()
        self.on_failure, self.check = self._liveness.on_failure, self._liveness.check
        self._streams: weakref.WeakSet[CopyStream] = weakref.WeakSet()
        self._reads: set[asyncio.Future[None]] = set()
        connection.start(self._told, self._fail)

    @property
    def error(self) -> PeerLost | None:
        return self._liveness.error

    @property
    def reached(self) -> bool:
        return True

    async def remote(self, target: RdmaTarget) -> Remote:
        """Maps the region when it is first used. Raises `TargetInvalid`; `PeerLost` of an owner that says nothing."""
        name = _unframed(_KEY, _KEY_MAGIC, target.remote_key, "target.remote_key")
        self.check()
        address, view = self._mapped.get(name) or await self._ask(name)
        self.check()
        self._mapped[name] = address, view
        return SharedRemote(window(view, target.address - address, target.length, "target"))

    def memory(self, remote: Remote) -> Bytes | None:
        assert isinstance(remote, SharedRemote)
        return remote.view

    async def get(
        self, region: Region, offset: int, length: int, remote: Remote, remote_offset: int, *, timeout_s: float
    ) -> None:
        assert isinstance(region, SharedRegion) and isinstance(remote, SharedRemote)
        self.check()
        target = window(region.view, offset, length, "source")
        source = remote.window(remote_offset, length)
        reading = self._transport.loop.run_in_executor(self._transport.threads, np.copyto, target, source)
        self._reads.add(reading)
        reading.add_done_callback(self._reads.discard)
        await to_its_end(reading)

    def stream(self, region: Region, remote: Remote, tenant: str = "") -> PayloadStream:
        assert isinstance(region, SharedRegion) and isinstance(remote, SharedRemote)
        stream = CopyStream(self, self._transport.turns, region.view, remote.view, tenant)
        self._streams.add(stream)
        return stream

    def send(self, message: bytes) -> None:
        """Send from any thread."""
        self.check()
        self._connection.send(Message.TELL, message)

    async def flush(self, timeout_s: float) -> None:
        await self._connection.flush(timeout_s)

    async def settle(self, timeout_s: float) -> None:
        for stream in list(self._streams):
            stream.stop()
            with contextlib.suppress(PeerLost):
                await stream.drain(timeout_s)
        if self._reads:
            await asyncio.wait(self._reads, timeout=timeout_s)

    async def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        self._connection.close()

    # ----

    async def _ask(self, name: bytes) -> tuple[int, Bytes]:
        if len(self._mapped) >= _REGIONS_MAX:
            raise TargetInvalid(f"{_REGIONS_MAX} regions of this client are mapped", field="target")
        number = next(self._numbers)
        answer: asyncio.Future[_Grant] = self._transport.loop.create_future()
        self._asked[number] = answer
        try:
            self._connection.send(Message.ASK, _NUMBER.pack(number) + name)
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                grant = await answer
        except TimeoutError:
            raise PeerLost(f"the owner has not handed out its memory within {_ASK_TIMEOUT_S} s") from None
        finally:
            del self._asked[number]
        return grant.address, await self._transport.loop.run_in_executor(self._transport.threads, _mapped, grant)

    def _told(self, kind: Message, body: bytes, files: list[int]) -> None:
        if kind is Message.DROP:
            self._mapped.pop(body, None)
            return
        granted = kind is Message.GRANT and len(body) == _GRANT.size and len(files) == 1
        if not granted and (kind is not Message.DENY or len(body) != _NUMBER.size):
            return
        answer = self._asked.get(_NUMBER.unpack_from(body)[0])
        if answer is None or answer.done():
            return
        if granted:
            _, address, start, length = _GRANT.unpack(body)
            answer.set_result(_Grant(os.fdopen(os.dup(files[0]), "rb", 0), address, start, length))
        else:
            answer.set_exception(TargetInvalid("the owner does not know the region", field="target.remote_key"))

    def _fail(self, why: str) -> None:
        error = PeerLost(why)
        self._mapped.clear()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)
        self._liveness.fail(error)


def _mapped(grant: _Grant) -> Bytes:
    """The owner's memory. Raises `TargetInvalid` for a file that another process' mistake could make a trap of."""
    with grant.file:
        return _mapped_file(grant.file.fileno(), grant.start, grant.length)


def _mapped_file(file: int, start: int, length: int) -> Bytes:
    about = os.fstat(file)
    try:
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError as error:
        raise TargetInvalid(f"the memory has no seals: {error}", field="target") from None
    if seals & _SEALS != _SEALS or seals & fcntl.F_SEAL_WRITE:
        raise TargetInvalid("the memory is not sealed against shrinking and growing", field="target")
    if not stat.S_ISREG(about.st_mode) or about.st_blksize > _PAGE_MAX:
        raise TargetInvalid("the memory is no ordinary one", field="target")
    if length <= 0 or start + length > about.st_size:
        raise TargetInvalid(f"{start} + {length} bytes are more than the {about.st_size} of the file", field="target")
    if os.lseek(file, start, os.SEEK_HOLE) < start + length:
        raise TargetInvalid("the memory is not populated, and would be charged to this process", field="target")
    page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        mapping = mmap.mmap(file, start + length - page, offset=page)
    except (OSError, ValueError, OverflowError) as error:
        raise TargetInvalid(f"the memory cannot be mapped: {error}", field="target") from None
    view: Bytes = np.frombuffer(mapping, dtype=np.uint8)[start - page :]
    _populate(view)
    return view


def _populate(view: Bytes) -> None:
    """Enter its pages into this process' page table, rather than at the first touch of each."""
    start = view.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    length = view.ctypes.data + view.nbytes - start
    _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)


def _bytes_of(buffer: Any) -> Bytes:
    """Return the bytes of anything contiguous: arrays, mappings, tensors of any type of the CPU's memory."""
    if hasattr(buffer, "data_ptr"):
        memory = (ctypes.c_uint8 * buffer.nbytes).from_address(buffer.data_ptr())
        return np.frombuffer(memory, dtype=np.uint8)
    return np.frombuffer(memoryview(buffer).cast("B"), dtype=np.uint8)


def _framed(frame: struct.Struct, magic: bytes, name: bytes) -> bytes:
    return frame.pack(magic, name, zlib.crc32(name))


def _unframed(frame: struct.Struct, magic: bytes, framed: bytes, field: str) -> bytes:
    """Unpack an address or a key. Raises `TargetInvalid`."""
    if len(framed) == frame.size:
        frame_magic, name, crc = frame.unpack(framed)
        if frame_magic == magic and crc == zlib.crc32(name):
            return cast(bytes, name)
    raise TargetInvalid("not of shared memory", field=field)
