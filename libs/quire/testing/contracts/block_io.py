"""The port of batched I/O on open files, in the shape of Tutti's gio_uring (§3.2)."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from quire.model.iocb import Contexts, Iocb, Op

BlockIO = Any
"""What `quire.testing.block_io.PlainBlockIO` does."""
_SIZE = 8 << 20
_MEMORY = 4 << 20


class Started:
    """A `BlockIO` over two files of 8 MiB, with 4 MiB of page-aligned memory, as O_DIRECT wants it."""

    def __init__(self, io: BlockIO, folder: Path, flags: int) -> None:
        self.io = io
        self.paths = [folder / "file0", folder / "file1"]
        for index, path in enumerate(self.paths):
            path.write_bytes(np.random.default_rng(index).integers(0, 256, _SIZE, dtype=np.uint8).tobytes())
        self.files = [os.open(path, flags) for path in self.paths]
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, _MEMORY), dtype=np.uint8)

    def start(self) -> None:
        self.io.init_queue(self.files, [self.memory])

    def batch(
        self, op: Op, files: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], places: Sequence[int]
    ) -> Iocb:
        """Issue one batch. `places`: in the memory."""
        base = int(self.memory.ctypes.data)
        columns = (files, offsets, lengths, [base + place for place in places])
        iocb: Iocb = self.io.get_iocb()
        iocb.fill(op, Contexts(*(np.array(column, dtype=np.int64) for column in columns)))
        self.io.issue_io(iocb)
        return iocb

    async def completed(self, count: int) -> list[Iocb]:
        """Wait on the event descriptor until that number of batches have completed."""
        loop, ready, completed = asyncio.get_running_loop(), asyncio.Event(), list[Iocb]()
        loop.add_reader(self.io.event_fd, ready.set)
        try:
            async with asyncio.timeout(20):
                while len(completed) < count:
                    await ready.wait()
                    ready.clear()
                    completed += self.io.wait_cqe()
        finally:
            loop.remove_reader(self.io.event_fd)
        return completed


class BlockIOContract:
    """Fixture `block_io`: one that was not started. `open_flags`: with what its files are opened."""

    open_flags = os.O_RDWR
    unavailable: type[Exception] = NotImplementedError
    """Raised by `init_queue` where it cannot run: the suite is skipped there."""

    @pytest.fixture
    def drive(self, block_io: BlockIO, tmp_path: Path) -> Iterator[Started]:
        """Fixture: a started one with files in a folder of its own."""
        drive = Started(block_io, tmp_path, self.open_flags)
        try:
            drive.start()
        except self.unavailable as error:
            pytest.skip(str(error))
        yield drive
        block_io.close()
        for file in drive.files:
            os.close(file)

    async def test_every_context_lands_at_its_place(self, drive: Started) -> None:
        """512 scattered reads from two files, in one batch, each where its address says."""
        generator = np.random.default_rng(7)
        offsets = (generator.integers(0, _SIZE // 4096 - 1, 512) * 4096).tolist()
        files = generator.integers(0, 2, 512).tolist()
        places = (generator.permutation(512) * 4096).tolist()
        iocb = drive.batch(Op.READ, files, offsets, [4096] * 512, places)
        assert await drive.completed(1) == [iocb]
        assert not len(iocb.failed())
        contents = [path.read_bytes() for path in drive.paths]
        for file, offset, place in zip(files, offsets, places, strict=True):
            assert drive.memory[place : place + 4096].tobytes() == contents[file][offset : offset + 4096]

    async def test_each_batch_completes_once(self, drive: Started) -> None:
        """Several in flight, more contexts than any depth, in whatever order; then there is nothing more."""
        turns = [[(turn << 20) + place * 4096 for place in range(256)] for turn in range(4)]
        issued = [drive.batch(Op.READ, [1] * 256, at, [4096] * 256, at) for at in turns]
        assert {id(iocb) for iocb in await drive.completed(4)} == {id(iocb) for iocb in issued}
        assert drive.io.wait_cqe() == []

    async def test_what_is_written_and_synced_is_in_the_file(self, drive: Started) -> None:
        drive.memory[:] = np.random.default_rng(9).integers(0, 256, _MEMORY, dtype=np.uint8)
        wrote = drive.batch(Op.WRITE, [0, 1], [4096, 1 << 20], [3 << 20, 1 << 20], [0, 3 << 20])
        await drive.completed(1)
        synced = drive.batch(Op.SYNC, [0, 1], [0, 0], [0, 0], [0, 0])
        await drive.completed(1)
        assert not len(wrote.failed()) and synced.results.tolist() == [0, 0]
        raw = drive.memory.tobytes()
        assert drive.paths[0].read_bytes()[4096 : 4096 + (3 << 20)] == raw[: 3 << 20]
        assert drive.paths[1].read_bytes()[1 << 20 : 2 << 20] == raw[3 << 20 :]

    async def test_a_read_past_the_end_tells_how_much_there_was(self, drive: Started) -> None:
        iocb = drive.batch(Op.READ, [0, 0, 1], [_SIZE - 4096, _SIZE, 0], [8192, 4096, 4096], [0, 8192, 12288])
        await drive.completed(1)
        assert iocb.results.tolist() == [4096, 0, 4096]

    async def test_a_context_that_fails_costs_no_other(self, drive: Started) -> None:
        """A file opened for reading cannot be written: EBADF for that context, in a batch with a good one."""
        flags = self.open_flags & ~os.O_RDWR | os.O_RDONLY
        read_only = os.open(drive.paths[0], flags)
        drive.io.close()
        drive.io.init_queue([read_only, drive.files[1]], [drive.memory])
        iocb = drive.batch(Op.WRITE, [0, 1], [0, 0], [4096, 4096], [0, 0])
        await drive.completed(1)
        assert iocb.results.tolist() == [-errno.EBADF, 4096]
        assert iocb.failed().tolist() == [0] and iocb.why(0) == "EBADF"
        os.close(read_only)

    def test_it_says_what_it_is(self, drive: Started) -> None:
        assert drive.io.name and drive.io.description
