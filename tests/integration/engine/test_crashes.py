"""The machine dies at the Nth write, sync or rename, for every N until a run completes."""

from __future__ import annotations

import numpy as np
import pytest

from quire.model.durability import Durability
from quire.model.errors import QuireError
from quire_storage.errors import DriveUnusable, ForeignPool
from tests.integration.engine.disk import SimDisk
from tests.integration.engine.rig import Engine, key_of, payload_of

_RUNS_MAX = 400


async def _work(engine: Engine, acknowledged: set[int], dropped: set[int]) -> None:
    """Stores in groups, a drop, stores that reuse its slots, a level raised: what is acknowledged is noted."""
    for first in (0, 8, 16):
        numbers = list(range(first, first + 8))
        await engine.put(numbers, Durability.LOCAL)
        acknowledged.update(numbers)
    acknowledged -= set(range(8, 16))
    await engine.drop(list(range(8, 16)))
    dropped.update(range(8, 16))
    await engine.put(list(range(24, 32)), Durability.LOCAL)
    acknowledged.update(range(24, 32))
    await engine.put(list(range(32, 36)), Durability.MEMORY)
    await engine.tiers.raise_level([key_of(number) for number in range(32, 36)], Durability.LOCAL)
    acknowledged.update(range(32, 36))


_SLOW = [pytest.param(seed, 1, marks=pytest.mark.slow) for seed in range(4)]


@pytest.mark.parametrize(("seed", "step"), [(0, 3), *_SLOW])
async def test_a_power_cut_at_any_operation_loses_nothing_acknowledged(seed: int, step: int) -> None:
    """And brings back nothing that a finished drop took away, and no byte that was not stored."""
    for number in range(1, _RUNS_MAX, step):
        disk = SimDisk(seed * 1000 + number)
        disk.fail_at = number
        acknowledged: set[int] = set()
        dropped: set[int] = set()
        completed = False
        engine = Engine(disk)
        try:
            await engine.start()
            await _work(engine, acknowledged, dropped)
            completed = not disk.dead
            await engine.stop()
        except (QuireError, DriveUnusable):
            if hasattr(engine, "integrity"):
                await engine.stop()
        disk.crash()
        again = await Engine(disk).start()
        if acknowledged:
            wanted = sorted(acknowledged)
            got = await again.get(wanted)
            assert np.array_equal(got, np.stack([payload_of(each) for each in wanted], axis=1)), number
        assert not [each for each in dropped if again.has(each)], number
        for each in range(36):
            if each not in acknowledged | dropped and again.has(each):
                assert np.array_equal((await again.get([each]))[:, 0], payload_of(each)), number
        # The survivor goes on working: what is stored now lies on no slot in use.
        await again.put(list(range(100, 120)), Durability.LOCAL)
        for each in sorted(acknowledged) + list(range(100, 120)):
            assert np.array_equal((await again.get([each]))[:, 0], payload_of(each)), number
        await again.stop()
        if completed:
            assert number > 20, "the work consists of more operations than that"
            return
    pytest.fail("the work never completed")


async def test_every_header_byte_flipped_costs_that_chunk_at_most() -> None:
    """A header is believed whole or not at all; its neighbours are not touched by it."""
    disk = SimDisk()
    engine = await Engine(disk, drives=("a",)).start()
    await engine.put(list(range(8)), Durability.LOCAL)
    place = engine.place(3)
    assert place is not None
    at = 65536 + place.header
    await engine.stop()
    file = disk.files["a"]
    whole = bytes(file.now)
    for byte in range(192 + 4 * 3):
        for data in (file.now, file.durable):
            data[:] = whole
            data[at + byte] ^= 0x40
        again = await Engine(disk, drives=("a",)).start()
        assert again.has(3) is False, byte
        for each in (0, 1, 2, 4, 5, 6, 7):
            assert np.array_equal((await again.get([each]))[:, 0], payload_of(each)), byte
        await again.put([3], Durability.LOCAL)
        assert np.array_equal((await again.get([3]))[:, 0], payload_of(3)), byte
        await again.stop()


@pytest.mark.parametrize("which", [0, 1])
async def test_a_damaged_superblock_is_what_the_other_is_for(which: int) -> None:
    """Every byte of one copy flipped in turn: the pool opens. Both damaged: it is refused and left alone."""
    disk = SimDisk()
    engine = await Engine(disk, drives=("a",)).start()
    await engine.put([1], Durability.LOCAL)
    await engine.stop()
    file = disk.files["a"]
    whole = bytes(file.now)
    for byte in range(0, 4096, 7):
        file.now[:] = whole
        file.now[which * 4096 + byte] ^= 1
        again = await Engine(disk, drives=("a",)).start()
        found = again.has(1)
        # The older copy may not know yet of the first header page: then the chunk is a miss, never wrong.
        if found:
            assert np.array_equal((await again.get([1]))[:, 0], payload_of(1))
        await again.stop()
    file.now[:] = whole
    file.now[100] ^= 1
    file.now[4096 + 100] ^= 1
    damaged = bytes(file.now)
    with pytest.raises(ForeignPool, match="both its superblocks"):
        await Engine(disk, drives=("a",)).start()
    assert bytes(file.now) == damaged
