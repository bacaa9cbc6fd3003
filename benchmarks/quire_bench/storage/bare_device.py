"""The bare device, as a baseline: blocks of ordinary files, read or written by nothing but a way of I/O.

The ways are this project's own `BlockIO` by io_uring and by threads, and fio where it is installed (C, io_uring). The
quickest counts: a baseline in the same Python alone would flatter what is measured.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import shutil
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from quire.model.errors import InternalError
from quire.model.iocb import Contexts
from quire_server.clock import SystemClock
from quire_storage.adapters.block_io import choose_block_io
from quire_storage.core.slack import SlackLimits
from quire_storage.errors import BlockIOUnavailable
from quire_storage.tiers.ring import Ring
from quire_tools.report import median

Bytes = npt.NDArray[np.uint8]
BATCH_BYTES: Final = 16 << 20
BATCHES: Final = 4
_BLOCK_BYTES: Final = 1 << 20
_FIO_S: Final = 120.0


def best(rounds: Sequence[dict[str, float]]) -> list[float]:
    """The rounds of that way of I/O whose median is the highest."""
    ways = [[each[way] for each in rounds] for way in rounds[0]]
    return max(ways, key=median)


class BareDevice:
    """One file of `size` / number of folders in each. `memory`: of a pool that uses the same, or its own."""

    def __init__(self, folders: Sequence[str], size: int, depth: int, memory: Bytes | None = None) -> None:
        self._size = size // len(folders) // BATCH_BYTES * BATCH_BYTES or BATCH_BYTES
        if memory is None:
            memory = np.frombuffer(mmap.mmap(-1, BATCHES * BATCH_BYTES), dtype=np.uint8)
            memory[:] = np.random.default_rng(1).integers(0, 256, memory.nbytes, dtype=np.uint8)
        self._memory = memory
        self._depth = depth
        self._rings: dict[str, Ring] = {}
        self._files = []
        self._paths = [Path(folder) / "bare.bin" for folder in folders]
        for path in self._paths:
            file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0))
            os.posix_fallocate(file, 0, self._size)
            for at in range(0, self._size, BATCH_BYTES):
                os.pwritev(file, [memory[:BATCH_BYTES].data], at)
            os.fsync(file)
            self._files.append(file)

    async def start(self) -> None:
        for name in ("io_uring", "threads"):
            try:
                io = choose_block_io(name, self._depth, direct=True)
                ring = Ring(io, SystemClock(), SlackLimits(), slack=False)
                await ring.start(self._files, [self._memory])
            except BlockIOUnavailable:
                continue
            self._rings[name] = ring

    @property
    def ways(self) -> list[str]:
        """Of I/O that are compared."""
        return [*self._rings, *(["fio"] if shutil.which("fio") else [])]

    async def close(self) -> None:
        for ring in self._rings.values():
            await ring.close()
        for file, path in zip(self._files, self._paths, strict=True):
            os.close(file)
            path.unlink()

    async def rates(self, size: int, *, write: bool = False) -> dict[str, float]:
        """Bytes per second at which each way of I/O moves `size` bytes."""
        rates = {name: await self._rate(ring, size, write=write) for name, ring in self._rings.items()}
        if shutil.which("fio"):
            rates["fio"] = await self._fio(size, write=write)
        return rates

    async def _fio(self, size: int, *, write: bool) -> float:
        command = ["fio", "--name=bare", f"--filename={':'.join(map(str, self._paths))}", f"--bs={_BLOCK_BYTES}"]
        command += ["--direct=1", "--ioengine=io_uring", f"--iodepth={self._depth}", f"--io_size={size}"]
        command += [f"--filesize={self._size}", "--rw=write" if write else "--rw=read", "--output-format=json"]
        command += ["--file_service_type=roundrobin", "--end_fsync=1"]
        run = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(_FIO_S):
            out, _ = await run.communicate()
        if run.returncode:
            raise InternalError(f"fio ended with {run.returncode}; without it on the PATH this runs too")
        job = json.loads(out)["jobs"][0]
        if write:  # its own figure leaves the sync at the end out
            return float(job["write"]["io_bytes"] / job["job_runtime"] * 1e3)
        return float(job["read"]["bw_bytes"])

    async def _rate(self, ring: Ring, size: int, *, write: bool) -> float:
        started, moved = time.perf_counter(), 0
        ahead: deque[asyncio.Task[object]] = deque()
        while moved < size:
            contexts = self._batch(moved)
            moved += contexts.bytes
            ahead.append(asyncio.create_task(ring.write(contexts) if write else ring.read(contexts)))
            if len(ahead) >= BATCHES - 1:
                await ahead.popleft()
        while ahead:
            await ahead.popleft()
        if write:
            await ring.sync(list(range(len(self._files))))
        return moved / (time.perf_counter() - started)

    def _batch(self, moved: int) -> Contexts:
        """The next batch's worth of blocks, in turn from each file."""
        blocks = BATCH_BYTES // _BLOCK_BYTES
        number = moved // _BLOCK_BYTES + np.arange(blocks, dtype=np.int64)
        offsets = number // len(self._files) * _BLOCK_BYTES % self._size
        place = int(self._memory.ctypes.data) + moved // BATCH_BYTES % BATCHES * BATCH_BYTES
        addresses = place + np.arange(blocks, dtype=np.int64) * _BLOCK_BYTES
        return Contexts(number % len(self._files), offsets, np.full(blocks, _BLOCK_BYTES), addresses)
