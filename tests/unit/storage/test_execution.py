"""Whatever an instruction ends with, the residency machine hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from quire.model.errors import InternalError
from quire.testing import FakeClock
from quire_storage.core.residency import events as ev
from quire_storage.tiers.execution import Executor
from tests.unit.storage.residency_world import chunk_of


class _Machine:
    """Answers a named event with the instruction under test; keeps what it hears."""

    def __init__(self, instruction: Any) -> None:
        self._instruction = instruction
        self.heard: list[Any] = []
        self.hits: dict[str, int] = {}
        self.evictions: dict[str, int] = {}

    def handle(self, event: Any, now_s: float) -> list[Any]:
        if event == "begin":
            return [self._instruction]
        self.heard.append(event)
        return []


class _Broken:
    """A pool and a registry of which every call fails as no one expects."""

    async def write(self, *_: Any) -> None:
        raise OSError("io_uring_enter")

    rewrite = forget = withdraw = may_go = may_withdraw = joining = write

    async def registering(self, records: Sequence[Any], *, patient: bool = True) -> AsyncIterator[Any]:
        raise OSError("no buffer space")
        yield


class _Index:
    """A registry that lists only what joins an entry of generation 7."""

    async def joining(
        self, records: Sequence[Any], generations: Sequence[int], *, only_in_object: bool
    ) -> dict[bytes, int]:
        return {record.key: each for record, each in zip(records, generations, strict=True) if each == 7}


async def _carried_out(machine: Any, broken: Any) -> Executor:
    executor = Executor(
        residency=machine,
        arena=SimpleNamespace(address=0),  # type: ignore[arg-type]
        pool=broken,
        write_behind=None,
        registry=broken,
        clock=FakeClock(),
        checked=0,
    )
    executor.post("begin")  # type: ignore[arg-type]
    async with asyncio.timeout(5):
        while not machine.heard or isinstance(machine.heard[-1], ev.Indexed):
            await asyncio.sleep(0)
    return executor


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        (ev.Write(1, [], []), ev.WriteFailed),
        (ev.WriteHeaders(1, []), ev.WriteFailed),
        (ev.Forget(2, []), ev.Forgotten),
        (ev.Register(3, []), ev.IndexingEnded),
        (ev.Register(3, [], within=[1]), ev.IndexingEnded),
        (ev.Withdraw([]), ev.Withdrawn),
        (ev.AskToEvict(4, []), ev.Answered),
        (ev.AskToWithdraw(5, [], ("b",)), ev.Answered),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, type) else value.__name__,
)
async def test_an_instruction_that_fails_unexpectedly_ends(instruction: Any, expected: type) -> None:
    """A store waited for ever, and every later one of its keys, after one OSError of a sync."""
    machine: Any = _Machine(instruction)
    executor = await _carried_out(machine, _Broken())
    (heard,) = machine.heard
    assert isinstance(heard, expected)
    if hasattr(heard, "error"):
        assert isinstance(heard.error, InternalError)
    if isinstance(heard, ev.Answered):
        assert not heard.out, "without an answer nothing goes"
    await executor.close()


async def test_what_came_from_the_object_tier_joins_its_entry_and_makes_none() -> None:
    """Its prefix may have been evicted since: registered like a stored copy, it would come back."""
    records = [chunk_of(0).record, chunk_of(1).record]
    machine: Any = _Machine(ev.Register(3, records, within=[7, 8]))
    executor = await _carried_out(machine, _Index())
    assert machine.heard == [ev.Indexed(3, {records[0].key: 7}), ev.IndexingEnded(3)]
    await executor.close()
