"""Drives that fail reads: what cannot be read is not wrong. It is kept, read again, healed from others; in the end its
drive is retired.
"""

from __future__ import annotations

import asyncio
import errno

import numpy as np
import pytest

from quire.model.durability import Durability
from quire.model.errors import CorruptData
from quire.model.iocb import Op
from tests.integration.engine.disk import Fault, SimDisk, no_fault
from tests.integration.engine.rig import Engine, key_of, payload_of, with_settings

NUMBERS = list(range(16))


def _fails_reads(file: int | None = None) -> Fault:
    return lambda op, at, offset, length: -errno.EIO if op is Op.READ and file in (None, at) else None


async def _restarted(disk: SimDisk, **settings: object) -> Engine:
    """An engine whose chunks lie on drives alone."""
    config = with_settings(**settings)
    engine = await Engine(disk, config).start()
    await engine.put(NUMBERS, Durability.LOCAL)
    await engine.stop()
    return await Engine(disk, config).start()


async def test_reads_that_fail_for_a_moment_cost_no_chunk() -> None:
    """Finding D3: EIO counted as corruption, and the scrubber zeroed the sound headers."""
    disk = SimDisk()
    engine = await _restarted(disk)
    await engine.tiers.reregister(list(map(key_of, NUMBERS)))
    disk.fault = _fails_reads()
    scrubbing = asyncio.create_task(engine.integrity.scrub(10**9))
    retrying = asyncio.create_task(engine.integrity.retry())
    with pytest.raises(CorruptData):
        await engine.get(NUMBERS)
    async with asyncio.timeout(20):
        while engine.integrity.quarantined < len(NUMBERS):
            await asyncio.sleep(0.01)
    disk.fault = no_fault
    async with asyncio.timeout(20):
        while engine.integrity.quarantined:
            await asyncio.sleep(0.01)
    for task in (scrubbing, retrying):
        task.cancel()
    assert np.array_equal((await engine.get(NUMBERS))[:, 3], payload_of(3))
    assert not engine.integrity.corrupt and not engine.pool.map.failed_drives()
    assert set(engine.withdrawn) == set(map(key_of, NUMBERS)), "look-ups did not promise them meanwhile"
    assert engine.listed.keys() == set(map(key_of, NUMBERS)), "and do again"
    await engine.stop()
    engine = await Engine(disk).start()
    assert all(map(engine.has, NUMBERS))
    await engine.stop()


async def test_what_cannot_be_read_is_healed_from_another_copy() -> None:
    disk = SimDisk()
    engine = await _restarted(disk)
    engine.copies = {key_of(number): payload_of(number) for number in NUMBERS}
    disk.fault = _fails_reads(0)
    found = await engine.get(NUMBERS)
    assert all(np.array_equal(found[:, number], payload_of(number)) for number in NUMBERS)
    assert engine.integrity.healed and not engine.integrity.quarantined
    disk.fault = no_fault
    await engine.stop()


async def test_a_quarantined_copy_is_left_alone_until_its_next_try() -> None:
    disk, reads = SimDisk(), list[int]()
    engine = await _restarted(disk)

    def fault(op: Op, file: int, offset: int, length: int) -> int | None:
        reads.append(offset)
        return -errno.EIO if op is Op.READ else None

    disk.fault = fault
    assert await engine.integrity.sound(key_of(1)) is None
    with engine.tiers.pinned([key_of(1)]) as copies:
        before = len(reads)
        assert await engine.integrity.heal(copies[0]) is None
        assert len(reads) == before, "its drive was not read again"
    assert engine.has(1), "readers miss it, and it stays"
    disk.fault = no_fault
    await engine.stop()


async def test_a_drive_that_goes_on_failing_reads_is_retired() -> None:
    """Its chunks are withdrawn, and come back with it at the next start."""
    disk = SimDisk()
    engine = await _restarted(disk, drive_error_s_max=0)
    disk.fault = _fails_reads(0)
    with pytest.raises(CorruptData):
        await engine.get(NUMBERS)
    assert engine.pool.map.failed_drives() == {0}
    assert 0 < sum(map(engine.has, NUMBERS)) < len(NUMBERS), "those on the other drive are served"
    await engine.stop()
    disk.fault = no_fault
    engine = await Engine(disk).start()
    assert all(map(engine.has, NUMBERS))
    await engine.stop()
