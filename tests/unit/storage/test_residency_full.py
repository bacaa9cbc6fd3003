"""The residency machine on drives that are full: what a write that waits for places asks for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire.model.durability import Durability
from quire.model.errors import PoolFull
from quire_storage.core.chunks import DiskPlace
from quire_storage.core.pool.slots import Shape
from quire_storage.core.residency import ResidencySettings
from quire_storage.core.residency import events as ev
from tests.unit.storage.residency_world import World, chunk_of, stored

FULL = ResidencySettings(pool_high_share=1.0, pool_low_share=1.0)


def _full(chains: Sequence[int]) -> World:
    """Return a node whose drive holds these chains, four chunks of 4 KiB each, and has no room for another chunk."""
    world = World(drives=1, objects=False, arena_slabs=40, drive_slabs=len(chains), settings=FULL)
    for first in chains:
        stored(world, [chunk_of(first + at) for at in range(4)])
    assert world.pool is not None and world.pool.used_bytes == world.pool.capacity_bytes
    return world


def _questions(world: World, monkeypatch: pytest.MonkeyPatch) -> list[ev.AskToEvict]:
    """Return a list that gets the questions to the index from now on."""
    questions, begin = list[ev.AskToEvict](), world._begin

    def observe(instruction: ev.Instruction) -> None:
        if isinstance(instruction, ev.AskToEvict):
            questions.append(instruction)
        begin(instruction)

    monkeypatch.setattr(world, "_begin", observe)
    return questions


def test_where_headers_run_out_before_bytes_one_question_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk was asked for alone, and each place that came free began a search for all: 20 s for 700 chunks."""
    world = World(drives=1, objects=False, arena_slabs=40, drive_slabs=20)
    for first in range(0, 64, 8):  # eight slabs of four; there are eight pages of headers
        stored(world, [chunk_of(first + at) for at in range(4)])
    assert world.pool is not None and world.pool.used_bytes < world.pool.capacity_bytes / 2
    questions, searches, take = _questions(world, monkeypatch), list[int](), world.pool.take

    def counted(shape: Shape, count: int) -> list[DiskPlace]:
        searches.append(count)
        return take(shape, count)

    monkeypatch.setattr(world.pool, "take", counted)
    stored(world, [chunk_of(64 + at) for at in range(4)])
    assert len(questions) == 1 and world.residency.evictions["disk"] == 4
    assert len(searches) == 2, "when the write began, and when the fourth place was free"


def test_while_places_are_coming_nothing_else_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index refuses all else, and the refusal ended the write whose place was coming."""
    world = _full([0, 8])
    world.leased = {chunk_of(first + at).key for first in (0, 8) for at in range(4)}
    questions = _questions(world, monkeypatch)
    world.drop(chunk_of(3).key)
    small = world.store([chunk_of(16)], Durability.LOCAL)
    large = world.store([chunk_of(24 + at) for at in range(4)], Durability.LOCAL)
    assert not questions and len(world.residency.writes.unplaced) == 2
    world.settle()
    assert world.acknowledge(*small) == {chunk_of(16).key}
    assert isinstance(world.answers[large[1]], PoolFull)
    world.acknowledge(*large)


def test_a_question_counts_the_places_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shapes wait: the bytes of both were taken for chunks of the first."""
    world = _full([0, 8])
    questions = _questions(world, monkeypatch)
    world.drop(chunk_of(3).key)
    first = world.store([chunk_of(16), chunk_of(17)], Durability.LOCAL)
    second = world.store([chunk_of(4)], Durability.LOCAL)
    assert not questions and len({write.shape for write in world.residency.writes.unplaced}) == 2
    world.settle()
    assert len(questions[0].records) == 1, "one place came free, and one is lacking"
    assert len(world.acknowledge(*first)) == 2 and len(world.acknowledge(*second)) == 1
