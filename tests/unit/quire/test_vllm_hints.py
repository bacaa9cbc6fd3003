"""Hints of an application, in `kv_transfer_params.quire`."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

from quire.integrations.hints import Hints
from quire.integrations.vllm.scheduler.hints import carry_out, hints_of, priority_of
from quire.model.errors import Unavailable
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.testing.simulation.loop import simulate

SPACE = Namespace("m", "1", KvLayout(1, 16, 1, 16, Dtype.BF16))
PREFIXES = [(SPACE, ChunkKeys(os.urandom(32 * 4))), (SPACE, ChunkKeys(os.urandom(32 * 6)))]


def _request(hints: Any, priority: int = 0) -> Any:
    return SimpleNamespace(request_id="r", priority=priority, kv_transfer_params={"quire": hints})


def test_hints_are_read() -> None:
    given = {"retain_s": 60, "priority": -3, "prefetch_by_s": 1.5, "demote": True}
    assert hints_of(_request(given)) == Hints(retain_s=60, priority=-3, prefetch_by_s=1.5, demote=True)
    assert hints_of(_request({})).is_empty and hints_of(SimpleNamespace(kv_transfer_params=None)).is_empty
    assert not hints_of(_request({"prefetch_by_s": 0})).is_empty, "at once"


@pytest.mark.parametrize(
    "wrong",
    [
        *({"retain_s": value} for value in ("soon", -1, True, float("inf"), float("nan"), None)),
        *({"priority": value} for value in (11, -11, 1.5, True, "high")),
        *({"prefetch_by_s": value} for value in (-1, "soon")),
        *({"demote": value} for value in (1, "yes", None)),
        {"retain": 5},
        "retain",
        5,
    ],
)
def test_what_is_not_understood_is_as_if_it_were_not_there(wrong: Any) -> None:
    assert hints_of(_request(wrong)) == Hints()


def test_one_that_is_not_understood_costs_no_other() -> None:
    assert hints_of(_request({"retain_s": "soon", "prefetch_by_s": 2, "demoted": True})) == Hints(prefetch_by_s=2)


def test_a_hinted_priority_is_in_place_of_vllms() -> None:
    assert priority_of(_request({}, priority=4), Hints()) == -4
    assert priority_of(_request({}, priority=4), Hints(priority=7)) == 7


class _Client:
    """Notes what is asked, and when. `stored`: chunks that are there, one more with each question."""

    def __init__(self, stored: int = 100) -> None:
        self.stored = stored
        self.asked: list[tuple[str, int, float]] = []
        self.fails = False

    def _note(self, what: str, keys: ChunkKeys) -> None:
        if self.fails:
            raise Unavailable("no gateway")
        self.asked.append((what, len(keys), round(asyncio.get_running_loop().time(), 3)))

    async def retain(self, namespace: Namespace, keys: ChunkKeys, seconds: float, *, holder: str) -> int:
        self._note(f"retain {seconds:g}{holder and f' for {holder}'}", keys)
        self.stored += 1
        return min(self.stored, len(keys))

    async def end_retention(self, namespace: Namespace, keys: ChunkKeys, *, holder: str) -> bool:
        self._note(f"end of {holder}", keys)
        return True

    async def demote(self, namespace: Namespace, keys: ChunkKeys) -> int:
        self._note("demote", keys)
        return 0

    async def prefetch(self, namespace: Namespace, keys: ChunkKeys, *, within_s: float) -> int:
        self._note(f"prefetch {within_s:g}", keys)
        return len(keys)


def _carried_out(hints: Hints, client: _Client | None = None) -> list[tuple[str, int, float]]:
    """What is asked on virtual time; waits before what is stored are none of it."""
    chosen = client or _Client()
    asynchronous: Any = chosen

    async def run(_: Any) -> None:
        await carry_out(asynchronous, PREFIXES, hints)

    simulate(1, run)
    return chosen.asked


def test_a_prompt_is_retained_once_all_of_it_is_stored() -> None:
    asked = _carried_out(Hints(retain_s=60), _Client(stored=2))
    assert [(what, count) for what, count, _ in asked] == [*[("retain 60", 4)] * 2, *[("retain 60", 6)] * 2]


def test_it_is_in_memory_when_it_is_wanted() -> None:
    """Whatever else is to be done before."""
    asked = _carried_out(Hints(prefetch_by_s=60.0))
    assert [what for what, *_ in asked] == ["prefetch 5"] * 2 and all(at_s == 55.0 for *_, at_s in asked)
    asked = _carried_out(Hints(prefetch_by_s=2.0))
    assert [(what, at_s) for what, _, at_s in asked] == [("prefetch 1", 1.0)] * 2
    asked = _carried_out(Hints(retain_s=9, prefetch_by_s=60.0), _Client(stored=0))
    assert asked[-1][0] == "prefetch 5" and asked[-1][2] == 55.0


def test_a_prompt_that_is_not_wanted_soon_gives_its_place_up() -> None:
    assert [what for what, *_ in _carried_out(Hints(demote=True))] == ["demote"] * 2


def test_a_session_holds_what_it_retains_until_it_ends() -> None:
    turn = _carried_out(Hints(retain_s=60, session="s"), _Client(stored=10))
    assert [what for what, *_ in turn] == ["retain 60 for s"] * 2
    end = _carried_out(Hints(demote=True, session="s"))
    assert [what for what, *_ in end] == ["end of s", "demote"] * 2


def test_a_cache_that_is_away_costs_a_line_in_the_log() -> None:
    client = _Client()
    client.fails = True
    assert _carried_out(Hints(retain_s=5, demote=True, prefetch_by_s=1.0), client) == []
