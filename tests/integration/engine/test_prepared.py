"""Deliveries that come again use the plan of those before, for as long as every chunk lies where it lay."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from quire.model.durability import Durability
from quire_storage.core.chunks import Copy, MemoryPlace
from quire_storage.core.plan import BatchPlan
from quire_storage.core.prepared import PreparedRuns
from tests.integration.engine.disk import SimDisk
from tests.integration.engine.rig import Engine, key_of, payload_of

_RUN = range(4)


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    """With a run of chunks in memory that was read once."""
    engine = await Engine(SimDisk()).start()
    await engine.put(_RUN, Durability.MEMORY)
    await _check(engine, _RUN)
    yield engine
    await engine.stop()


async def _check(engine: Engine, numbers: Sequence[int]) -> None:
    got = await engine.get(numbers)
    assert np.array_equal(got, np.stack([payload_of(number) for number in numbers], axis=1))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    """How many chunks each plan has that is made from now on."""
    plans, made = BatchPlan.__init__, list[int]()

    def init(self: BatchPlan, *arguments: object) -> None:
        plans(self, *arguments)  # type: ignore[arg-type]
        made.append(len(self.bases))

    monkeypatch.setattr(BatchPlan, "__init__", init)
    return made


async def test_the_same_run_is_planned_once(engine: Engine, planned: list[int]) -> None:
    for _ in range(3):
        await _check(engine, _RUN)
    assert planned == []


async def test_another_run_has_a_plan_of_its_own(engine: Engine, planned: list[int]) -> None:
    await _check(engine, _RUN[:3])
    await _check(engine, [0, 2, 1, 3])
    await _check(engine, _RUN)
    assert planned == [3, 4, 4], "the last one has the name of the one before"


async def test_a_chunk_in_the_middle_that_lies_elsewhere_now_is_planned_anew(
    engine: Engine, planned: list[int]
) -> None:
    """It was dropped, another one has its slot, and it was stored again: first, last and length are the same."""
    await engine.drop([1])
    await engine.put([40], Durability.MEMORY)
    await engine.put([1], Durability.MEMORY)
    await _check(engine, _RUN)
    assert planned == [4]


async def test_a_chunk_that_left_memory_and_came_back_is_planned_anew(engine: Engine, planned: list[int]) -> None:
    """By way of the drive. What it has in memory now may be where another was."""
    await engine.clean()
    for number in range(100, 200):
        await engine.put([number], Durability.LOCAL)
        for _ in range(3):
            await _check(engine, [number])
    planned.clear()
    moved = [engine.residency.copies.entries.get(key_of(number)) for number in _RUN]
    assert not all(entry is not None and entry.memory is not None for entry in moved), "memory holds eighty of them"
    for _ in range(4):
        await _check(engine, _RUN)
    assert planned, "they came to lie in memory again"


async def test_a_damaged_slice_is_seen_however_often_it_was_sent(engine: Engine, planned: list[int]) -> None:
    entry = engine.residency.copies.entries[next(iter(engine.residency.copies.entries))]
    assert entry.memory is not None
    engine.copies[entry.key] = payload_of(0)
    engine.arena.view[entry.memory.offset + 3] ^= 1
    await _check(engine, _RUN)
    assert planned == []


def _copies(first: int, count: int) -> list[Copy]:
    chunk: Any = None
    return [Copy(first + at, chunk, MemoryPlace(4096 * at, 4096 * count), None) for at in range(count)]


def test_a_plan_is_for_its_targets_and_its_stride() -> None:
    runs, copies, plan = PreparedRuns(), _copies(0, 4), cast(BatchPlan, object())
    targets = np.arange(4, dtype=np.int64)
    runs.keep(copies, targets, 64, plan)
    assert runs.find(copies, targets.copy(), 64) is plan
    assert runs.find(copies, targets[::-1], 64) is None
    assert runs.find(copies, targets, 128) is None


def test_those_used_last_are_kept() -> None:
    """By chunks: what is kept of a run grows with them."""
    runs, plan, targets = PreparedRuns(chunks_max=10), cast(BatchPlan, object()), np.arange(4, dtype=np.int64)
    several = [_copies(10 * number, 4) for number in range(3)]
    for copies in several[:2]:
        runs.keep(copies, targets, 64, plan)
    runs.find(several[0], targets, 64)
    runs.keep(several[2], targets, 64, plan)
    assert [runs.find(copies, targets, 64) for copies in several] == [plan, None, plan]
    for _ in range(5):
        runs.keep(several[0], targets, 64, plan)
    assert len(runs) == 2
