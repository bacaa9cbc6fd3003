"""The `Drives` port: one preallocated file, `pool.quire`, in a folder of each drive."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from pathlib import Path
from typing import Final

from quire_storage.errors import DriveUnusable

_NAME: Final = "pool.quire"
_LOCK_S: Final = 5.0
"""The kernel lets go of a killed process' io_uring, and of the files registered with it, after the process' end: 30 ms
were seen.
"""


class FileDrives:
    """Opens with O_DIRECT where the file system has it (`direct` is then True). One process per file.

    `preallocate`: a new file's space is reserved at once; else the file is sparse.
    """

    def __init__(self, *, direct: bool = True, preallocate: bool = True) -> None:
        self.direct = direct
        self._reserve = os.posix_fallocate if preallocate else _extend
        self._open: list[int] = []

    def open(self, name: str) -> int | None:
        path = Path(name)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not (path / _NAME).exists():
                return None
            return self._opened(path / _NAME)
        except OSError as error:
            raise DriveUnusable(f"{name}: {error.strerror}") from None

    def create(self, name: str, size: int, head: bytes) -> int:
        fresh = Path(name) / f"{_NAME}.new"
        try:
            file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                self._reserve(file, 0, size)
                os.pwrite(file, head, 0)
                os.fsync(file)
            finally:
                os.close(file)
            fresh.rename(Path(name) / _NAME)
            folder = os.open(name, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
            return self._opened(Path(name) / _NAME)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EFBIG):
                raise DriveUnusable(f"{name} has no room for a pool of {size} bytes") from None
            raise DriveUnusable(f"{name}: {error.strerror}") from None

    def grow(self, file: int, size: int, page: bytes, at: int) -> None:
        try:
            self._reserve(file, 0, size)
            os.fsync(file)
            with mmap.mmap(-1, len(page)) as aligned:
                aligned[:] = page
                os.pwritev(file, [aligned], at)
            os.fsync(file)
        except OSError as error:
            raise DriveUnusable(f"a pool cannot grow to {size} bytes: {error.strerror}") from None

    def head(self, file: int, length: int) -> bytes:
        with mmap.mmap(-1, length) as page:  # aligned, as O_DIRECT wants it
            return page[: os.preadv(file, [page], 0)]

    def size(self, file: int) -> int:
        return os.fstat(file).st_size

    def close(self) -> None:
        for file in self._open:
            os.close(file)
        self._open.clear()

    def _opened(self, path: Path) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            file = os.open(path, flags | (os.O_DIRECT if self.direct else 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = False  # tmpfs, some network file systems
            file = os.open(path, flags)
        try:
            _lock(file)
        except OSError as error:
            os.close(file)
            taken = isinstance(error, BlockingIOError)
            why = "is in use by another process" if taken else f"cannot be locked: {error.strerror}"
            raise DriveUnusable(f"{path} {why}") from None
        self._open.append(file)
        return file


def _extend(file: int, start: int, size: int) -> None:
    """Make a file at least this long, sparsely."""
    os.ftruncate(file, max(os.fstat(file).st_size, start + size))


def _lock(file: int) -> None:
    """Lock it for this process. Raises `BlockingIOError` if another one has it for longer than `_LOCK_S`."""
    deadline_s = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
        else:
            return
