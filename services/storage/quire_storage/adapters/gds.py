"""The `BlockIO` port on GPUDirect Storage, through kvikio: addresses are of device memory.

For a consumer that assembles layers on a GPU; a node's own arena is host memory. kvikio is no dependency of Quire's:
where it is not installed, this way of I/O does not exist.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.model.iocb import Iocb, Op
from quire_storage.errors import BlockIOUnavailable


class _DeviceSpan:
    """Device memory as kvikio takes it."""

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


class GdsBlockIO:
    """kvikio runs the transfers of an IOCB on its own threads; one thread here waits for them, IOCB by IOCB."""

    name = "gds"

    def __init__(self) -> None:
        self.event_fd = -1
        self._files: list[Any] = []
        self._numbers: list[int] = []
        self._done: deque[Iocb] = deque()
        self._started: deque[tuple[Iocb, list[Any]]] = deque()
        self._work = threading.Semaphore(0)
        self._waiter: threading.Thread | None = None

    @property
    def description(self) -> str:
        return "gds, kvikio"

    def init_queue(self, files: Sequence[int], memories: Sequence[npt.NDArray[np.uint8]]) -> None:
        if find_spec("kvikio") is None:
            raise BlockIOUnavailable("gds: kvikio is not installed")
        kvikio = import_module("kvikio")
        self._numbers = list(files)
        self._files = [kvikio.CuFile(f"/proc/self/fd/{file}", "r+") for file in files]
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiter = threading.Thread(target=self._wait, name="gds", daemon=True)
        self._waiter.start()

    def get_iocb(self) -> Iocb:
        return Iocb()

    def issue_io(self, iocb: Iocb) -> None:
        contexts, futures = iocb.contexts, []
        columns = (contexts.files, contexts.offsets, contexts.lengths, contexts.addresses)
        for file, offset, length, address in zip(*(column.tolist() for column in columns), strict=True):
            if iocb.op is Op.SYNC:
                futures.append(self._numbers[file])
                continue
            call = self._files[file].pread if iocb.op is Op.READ else self._files[file].pwrite
            futures.append(call(_DeviceSpan(address, length), length, offset))
        self._started.append((iocb, futures))
        self._work.release()

    def wait_cqe(self) -> list[Iocb]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.event_fd)
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def close(self) -> None:
        if self._waiter is not None:
            self._work.release()
            self._waiter.join()
            self._waiter = None
            for file in self._files:
                file.close()
            os.close(self.event_fd)

    def _wait(self) -> None:
        while True:
            self._work.acquire()
            if not self._started:
                return
            iocb, futures = self._started.popleft()
            iocb.results[:] = [self._result(iocb.op, future) for future in futures]
            self._done.append(iocb)
            os.eventfd_write(self.event_fd, 1)

    def _result(self, op: Op, future: Any) -> int:
        try:
            if op is Op.SYNC:
                os.fdatasync(future)
                return 0
            return int(future.get())
        except OSError as error:
            return -(error.errno or 5)
        except RuntimeError:  # what kvikio raises for a failed transfer
            return -5
