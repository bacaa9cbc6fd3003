"""Batched I/O that is done when it is issued, for tests of what stands above the port."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.model.iocb import Iocb, Op


class PlainBlockIO:
    """The `BlockIO` port by preadv and pwritev in the caller's thread."""

    name = "plain"
    description = "preadv in the caller's thread"

    def __init__(self) -> None:
        self.event_fd = -1
        self._files: list[int] = []
        self._done: list[Iocb] = []

    def init_queue(self, files: Sequence[int], memories: Sequence[npt.NDArray[np.uint8]]) -> None:
        self._files = list(files)
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def get_iocb(self) -> Iocb:
        return Iocb()

    def issue_io(self, iocb: Iocb) -> None:
        for index in range(len(iocb.contexts)):
            try:
                iocb.results[index] = self._do(iocb, index)
            except OSError as error:
                iocb.results[index] = -(error.errno or 1)
        self._done.append(iocb)
        os.eventfd_write(self.event_fd, 1)

    def wait_cqe(self) -> list[Iocb]:
        done, self._done = self._done, []
        if done:
            os.eventfd_read(self.event_fd)
        return done

    def close(self) -> None:
        if self.event_fd >= 0:
            os.close(self.event_fd)
            self.event_fd = -1

    def _do(self, iocb: Iocb, index: int) -> int:
        file = self._files[int(iocb.contexts.files[index])]
        if iocb.op is Op.SYNC:
            os.fdatasync(file)
            return 0
        memory = (ctypes.c_char * int(iocb.contexts.lengths[index])).from_address(int(iocb.contexts.addresses[index]))
        move = os.preadv if iocb.op is Op.READ else os.pwritev
        return move(file, [memory], int(iocb.contexts.offsets[index]))
