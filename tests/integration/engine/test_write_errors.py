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
from tests.integration.engine.rig import Engine, key_of, payload_of, with_settings


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


async def test_a_drive_that_is_given_up_during_a_commit_costs_the_others_nothing() -> None:
    """Headers on the healthy drive were taken for written, or for removed, and were not synced."""
    disk = SimDisk()
    engine = await Engine(disk, with_settings(drive_write_error_s_max=0.0)).start()
    await engine.put(list(range(16)), Durability.LOCAL)
    pool, synced = engine.pool, list[list[int]]()
    placed = [about for number in range(16) if (about := pool.map.get(key_of(number))) is not None]
    of_second = [about for about in placed if about.place.drive == 1]
    assert 0 < len(of_second) < len(placed) == 16
    write_pages, sync = pool._write_pages, engine.ring.sync

    async def lost_meanwhile(pages: dict[int, list[int]]) -> None:
        if 0 in pages:
            pool.lose(DriveFailed("it fails reads", frozenset([0])))
            raise DriveFailed("it fails writes", frozenset([0]))
        await write_pages(pages)

    async def noted(drives: list[int]) -> None:
        synced.append(drives)
        await sync(drives)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_write_pages", lost_meanwhile)
        patch.setattr(engine.ring, "sync", noted)
        results = await asyncio.gather(pool.rewrite(placed), pool.rewrite(of_second), return_exceptions=True)
    assert isinstance(results[0], DriveFailed) and results[1] is None
    assert synced[-1] == [1], "headers on the healthy drive are written for sure"
    await engine.stop()
