"""The `BlockIO` port on a pool of threads and plain pread and pwrite: runs anywhere."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt
from cffi import FFI

from quire.model.iocb import Iocb, Op

_ffi: Final = FFI()
_ffi.cdef(
    "long pread(int file, void *to, size_t length, long offset);"
    "long pwrite(int file, void *from, size_t length, long offset);"
    "int fdatasync(int file);"
)
_libc: Final = _ffi.dlopen(None)


class ThreadBlockIO:
    """`threads` of them take turns through the contexts of each IOCB."""

    name = "threads"

    def __init__(self, threads: int, *, direct: bool) -> None:
        self._threads = threads
        self.description = f"{threads} threads, pread, {'direct' if direct else 'buffered'}"
        self.event_fd = -1
        self._files: list[int] = []
        self._done: deque[Iocb] = deque()

    def init_queue(self, files: Sequence[int], memories: Sequence[npt.NDArray[np.uint8]]) -> None:
        self._files = list(files)
        self._pool = ThreadPoolExecutor(self._threads, "block-io")
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def get_iocb(self) -> Iocb:
        return Iocb()

    def issue_io(self, iocb: Iocb) -> None:
        parts = min(self._threads, len(iocb.contexts))
        remaining, lock = [parts], threading.Lock()

        def finished() -> None:
            with lock:
                remaining[0] -= 1
                last = remaining[0] == 0
            if last:
                self._done.append(iocb)
                os.eventfd_write(self.event_fd, 1)

        for part in range(parts):
            self._pool.submit(self._work, iocb, part, parts, finished)

    def wait_cqe(self) -> list[Iocb]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.event_fd)
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def close(self) -> None:
        if self.event_fd >= 0:
            self._pool.shutdown()
            os.close(self.event_fd)
            self.event_fd = -1

    def _work(self, iocb: Iocb, part: int, parts: int, finished: Callable[[], None]) -> None:
        try:
            rows = np.stack(
                [iocb.contexts.files, iocb.contexts.offsets, iocb.contexts.lengths, iocb.contexts.addresses], axis=1
            )[part::parts]
            results = [self._move(iocb.op, *row) for row in rows.tolist()]
            iocb.results[part::parts] = results
        finally:
            finished()

    def _move(self, op: Op, file: int, offset: int, length: int, address: int) -> int:
        if op is Op.SYNC:
            return 0 if _libc.fdatasync(self._files[file]) == 0 else -_ffi.errno
        call, done = (_libc.pread if op is Op.READ else _libc.pwrite), 0
        while done < length:
            count = int(call(self._files[file], _ffi.cast("void *", address + done), length - done, offset + done))
            if count < 0 and _ffi.errno == errno.EINTR:
                continue
            if count < 0:
                return -int(_ffi.errno)
            if count == 0:
                break
            done += count
        return done
