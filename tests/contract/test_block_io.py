"""Every implementation of the `BlockIO` port that this machine can run, on real files; and the ring that uses it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from quire.model.iocb import Contexts, Op
from quire.testing.block_io import PlainBlockIO
from quire.testing.contracts import BlockIOContract
from quire_server.clock import SystemClock
from quire_storage.adapters.threads import ThreadBlockIO
from quire_storage.adapters.uring import UringBlockIO
from quire_storage.core.slack import SlackLimits
from quire_storage.errors import BlockIOUnavailable, DriveFailed
from quire_storage.ports import BlockIO
from quire_storage.tiers.ring import Ring

SIZE = 8 << 20
MAKERS: dict[str, Callable[[bool], BlockIO]] = {
    "io_uring": lambda direct: UringBlockIO(32, direct=direct),
    "threads": lambda direct: ThreadBlockIO(4, direct=direct),
}


def memory(size: int) -> npt.NDArray[np.uint8]:
    """Page-aligned, as O_DIRECT wants it."""
    import mmap

    return np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)


def contexts(files: list[int], offsets: list[int], lengths: list[int], addresses: list[int]) -> Contexts:
    return Contexts(*(np.array(column, dtype=np.int64) for column in (files, offsets, lengths, addresses)))


class OnDrives(BlockIOContract):
    unavailable = BlockIOUnavailable


class TestUring(OnDrives):
    @pytest.fixture
    def block_io(self) -> BlockIO:
        return UringBlockIO(32, direct=False)


class TestUringDirect(OnDrives):
    open_flags = os.O_RDWR | os.O_DIRECT

    @pytest.fixture
    def block_io(self) -> BlockIO:
        return UringBlockIO(32, direct=True)


class TestThreads(OnDrives):
    @pytest.fixture
    def block_io(self) -> BlockIO:
        return ThreadBlockIO(4, direct=False)


class TestThreadsDirect(OnDrives):
    open_flags = os.O_RDWR | os.O_DIRECT

    @pytest.fixture
    def block_io(self) -> BlockIO:
        return ThreadBlockIO(4, direct=True)


class TestPlain(BlockIOContract):
    """What ships for tests elsewhere."""

    @pytest.fixture
    def block_io(self) -> BlockIO:
        return PlainBlockIO()


class Bench:
    """A ring over two files."""

    def __init__(self, ring: Ring, files: list[int], buffer: npt.NDArray[np.uint8]) -> None:
        self.ring, self.files, self.buffer = ring, files, buffer

    @property
    def base(self) -> int:
        return int(self.buffer.ctypes.data)


@pytest.fixture(params=[(name, direct) for name in MAKERS for direct in (False, True)], ids=str)
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    name, direct = request.param
    buffer = memory(4 << 20)
    ring = Ring(MAKERS[name](direct), SystemClock(), SlackLimits())
    flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
    files = []
    for index in range(2):
        data = np.random.default_rng(index).integers(0, 256, SIZE, dtype=np.uint8)
        (tmp_path / f"file{index}").write_bytes(data.tobytes())
        files.append(os.open(tmp_path / f"file{index}", flags))
    try:
        await ring.start(files, [buffer])
    except BlockIOUnavailable as error:
        pytest.skip(str(error))
    yield Bench(ring, files, buffer)
    await ring.close()
    for file in files:
        os.close(file)


async def test_more_contexts_than_one_iocb_and_than_the_depth(bench: Bench, tmp_path: Path) -> None:
    """Whole file in 4 KiB pieces, twice over: 4,096 contexts need several IOCBs and many turns of a depth of 32."""
    for _ in range(2):
        bench.buffer[:] = 0
        at = list(range(0, 4 << 20, 4096)) * 4
        await bench.ring.read(contexts([1] * len(at), at, [4096] * len(at), [bench.base + a for a in at]))
        assert bench.buffer.tobytes() == (tmp_path / "file1").read_bytes()[: 4 << 20]


async def test_a_short_read_is_counted_and_raises_nothing(bench: Bench) -> None:
    """Past the end there is nothing: the checksums find it; the ring counts it against the drive."""
    await bench.ring.read(contexts([0], [SIZE - 4096], [8192], [bench.base]))
    assert bench.ring.errors_by_file == {0: 1}
    await bench.ring.read(contexts([0], [0], [4096], [bench.base]))
    assert bench.ring.errors_by_file == {0: 1}


async def test_a_write_that_fails_says_so_and_costs_no_other(tmp_path: Path) -> None:
    """A file opened for reading: EBADF for that write alone."""
    (tmp_path / "closed").write_bytes(bytes(8192))
    (tmp_path / "open").write_bytes(bytes(8192))
    buffer = memory(8192)
    for make in MAKERS.values():
        files = [os.open(tmp_path / "closed", os.O_RDONLY), os.open(tmp_path / "open", os.O_RDWR)]
        ring = Ring(make(False), SystemClock(), SlackLimits())
        try:
            await ring.start(files, [buffer])
        except BlockIOUnavailable as error:
            pytest.skip(str(error))
        address = int(buffer.ctypes.data)
        bad = asyncio.create_task(ring.write(contexts([0], [0], [4096], [address])))
        await ring.write(contexts([1], [0], [4096], [address]))
        with pytest.raises(DriveFailed, match="EBADF"):
            await bad
        await ring.close()


async def test_a_cancelled_reader_is_held_until_the_drives_let_go(bench: Bench, tmp_path: Path) -> None:
    """Its memory may be lent again right after: nothing may land there any more."""
    at = list(range(0, 4 << 20, 4096))
    task = asyncio.create_task(
        bench.ring.read(contexts([0] * len(at), at, [4096] * len(at), [bench.base + a for a in at]))
    )
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    before = bench.buffer.copy()
    bench.buffer[:] = 1
    await asyncio.sleep(0.05)
    assert np.all(bench.buffer == 1)
    assert before.tobytes() == (tmp_path / "file0").read_bytes()[: 4 << 20]


def test_contexts_split_keeps_every_byte_at_its_place() -> None:
    whole = contexts([0, 1], [0, 100], [10, 25], [1000, 2000]).split(10)
    assert whole.files.tolist() == [0, 1, 1, 1]
    assert whole.offsets.tolist() == [0, 100, 110, 120]
    assert whole.lengths.tolist() == [10, 10, 10, 5]
    assert whole.addresses.tolist() == [1000, 2000, 2010, 2020]


def test_op_values_are_stable() -> None:
    """Fault injection and traces name them."""
    assert [op.name for op in Op] == ["READ", "WRITE", "SYNC"]
