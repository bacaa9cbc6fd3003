"""Drives that fail writes. A short failure costs a wait, a long one the drive. Stored chunks stay untouched."""

from __future__ import annotations

import asyncio
import errno

import numpy as np
import pytest

from quire.model.durability import Durability
from quire.model.iocb import Op
from quire_storage.errors import DriveFailed
from tests.integration.engine.disk import SimDisk
from tests.integration.engine.rig import Engine, payload_of, with_settings


class _Failing(SimDisk):
    """Refuses a number of writes with EROFS, as a file system that was remounted read-only."""

    refusals = 0
    refused = 0

    def refuse(self, count: int) -> None:
        self.refusals = count
        self.fault = self._refuse

    def _refuse(self, op: Op, file: int, offset: int, length: int) -> int | None:
        if op is not Op.WRITE or self.refused >= self.refusals:
            return None
        self.refused += 1
        return -errno.EROFS


async def test_writes_that_fail_for_a_moment_cost_no_chunk_and_no_drive() -> None:
    disk = _Failing()
    engine = await Engine(disk, with_settings(drive_write_error_s_max=60.0)).start()
    await engine.put([1], Durability.LOCAL)
    disk.refuse(3)
    await engine.put([2], Durability.LOCAL)
    assert disk.refused == 3 and not engine.pool.map.failed_drives()
    await engine.stop()
    engine = await Engine(disk).start()
    assert np.array_equal((await engine.get([1, 2]))[:, 1], payload_of(2))
    await engine.stop()


@pytest.mark.parametrize("seconds", [0.0, 0.2])
async def test_a_drive_that_goes_on_failing_writes_is_retired(seconds: float) -> None:
    """And its chunks are there again when it can be written to after the node's next start."""
    disk = _Failing()
    engine = await Engine(disk, with_settings(drive_write_error_s_max=seconds)).start()
    await engine.put([1], Durability.LOCAL)
    disk.refuse(10**9)
    assert engine.place(1) is not None
    with pytest.raises(DriveFailed):
        async with asyncio.timeout(20):
            await engine.put([2], Durability.LOCAL)
    assert engine.pool.map.failed_drives()
    disk.refuse(0)
    await engine.stop()
    engine = await Engine(disk).start()
    assert np.array_equal((await engine.get([1]))[:, 0], payload_of(1))
    await engine.stop()
