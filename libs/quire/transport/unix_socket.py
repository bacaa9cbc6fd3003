"""Messages between processes of one host, with open files: SOCK_SEQPACKET, non-blocking, from any thread."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from quire.model.errors import DeadlineExceeded, PeerLost

_MESSAGE_BYTES_MAX: Final = 64 << 10
_CREDENTIALS: Final = struct.Struct("3i")
_BACKLOG: Final = 128
_QUEUED_MAX: Final = 1 << 16
_STALE_S: Final = 60.0
_MAKING: Final = ".making"


class Message(enum.IntEnum):
    """Kind of a message: the first byte."""

    TELL = 1
    ASK = 2
    GRANT = 3
    DENY = 4
    DROP = 5


Told = Callable[[Message, bytes, list[int]], None]
"""(kind, body, files): the files are closed afterwards."""


def listening(path: Path, mode: int) -> socket.socket:
    """A socket at `path`, which is there once it listens. Raises `OSError`."""
    draft = path.with_suffix(_MAKING)
    listener = _socket()
    try:
        listener.bind(str(draft))
        draft.chmod(mode)
        listener.listen(_BACKLOG)
        draft.rename(path)
    except OSError:
        listener.close()
        raise
    return listener


def connected(path: Path, uids: Collection[int]) -> Connection:
    """Connect. Raises `PeerLost`, with the reason."""
    connection = _socket()
    try:
        connection.connect(str(path))
        return Connection(connection, uids)
    except FileNotFoundError:
        connection.close()
        raise PeerLost(f"its socket is not in {path.parent}: another host, or a folder that is not shared") from None
    except OSError as error:
        connection.close()
        raise PeerLost(f"its socket in {path.parent} cannot be used: {error.strerror}") from None


def swept(folder: Path) -> None:
    """Remove the sockets of processes that were killed."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if not path.is_socket() or time.time() - path.stat().st_mtime < _STALE_S:
                continue
            with _socket() as probe:
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink(missing_ok=True)


class Connection:
    """A connection. Raises `PermissionError` where the other side is another user's than `uids`."""

    def __init__(self, connected: socket.socket, uids: Collection[int]) -> None:
        raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(raw)
        if uid not in uids:
            connected.close()
            raise PermissionError(1, f"it belongs to user {uid}")
        connected.setblocking(False)
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._queued: deque[bytes] = deque()
        self._told: Told | None = None
        self._ended: Callable[[str], None] | None = None
        self._empty = asyncio.Event()
        self._closed = False

    def start(self, receive: Told, ended: Callable[[str], None]) -> None:
        """Receive messages; `ended` is called once, with the reason of the end."""
        self._told, self._ended = receive, ended
        self._loop.add_reader(self._socket.fileno(), self._readable)

    def send(self, kind: Message, body: bytes, file: int | None = None) -> None:
        """Send from any thread, a file from the loop's alone.

        Does not wait: messages beyond the socket's buffer are queued.
        """
        frame = bytes((kind,)) + body
        with self._lock:
            if self._closed:
                return
            if not self._queued:
                try:
                    if file is None:
                        self._socket.send(frame)
                    else:
                        socket.send_fds(self._socket, [frame], [file])
                    return
                except BlockingIOError:
                    if file is not None:
                        return  # who asked will not wait for long
                except OSError as error:
                    self._loop.call_soon_threadsafe(self._end, error.strerror or str(error))
                    return
            self._queued.append(frame)
            if len(self._queued) > _QUEUED_MAX:
                self._loop.call_soon_threadsafe(self._end, "the peer reads nothing")
            elif len(self._queued) == 1:
                self._loop.call_soon_threadsafe(self._watch)

    async def flush(self, timeout_s: float) -> None:
        """Wait until nothing is queued. Raises `DeadlineExceeded`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._queued and not self._closed:
                    self._empty.clear()
                    await self._empty.wait()
        except TimeoutError:
            raise DeadlineExceeded("the peer reads nothing") from None

    def close(self) -> None:
        self._end("the connection was closed")

    # ----

    def _watch(self) -> None:
        if not self._closed:
            self._loop.add_writer(self._socket.fileno(), self._writable)

    def _writable(self) -> None:
        with self._lock:
            while self._queued:
                try:
                    self._socket.send(self._queued[0])
                except BlockingIOError:
                    return
                except OSError:
                    break  # the reader hears of it
                self._queued.popleft()
            self._loop.remove_writer(self._socket.fileno())
        self._empty.set()

    def _readable(self) -> None:
        while not self._closed:
            try:
                data, files, flags, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES_MAX, 1)
            except BlockingIOError:
                return
            except OSError as error:
                self._end(error.strerror or str(error))
                return
            try:
                if not data:
                    self._end("the peer has gone")
                elif flags & socket.MSG_TRUNC or data[0] not in Message.__members__.values():
                    self._end("the peer says what no version of Quire says")
                elif self._told is not None:
                    self._told(Message(data[0]), data[1:], list(files))
            finally:
                for file in files:
                    os.close(file)

    def _end(self, why: str) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queued.clear()
            with contextlib.suppress(ValueError, OSError):
                self._loop.remove_reader(self._socket.fileno())
                self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
        self._empty.set()
        if self._ended is not None:
            self._ended(why)


def _socket() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    connection.setblocking(False)
    return connection
