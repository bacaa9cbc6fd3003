"""Long random histories of the residency machine."""

from __future__ import annotations

import os
import traceback

import pytest

from quire_storage.core.residency import events as ev
from quire_storage.core.residency.departures import Departures
from quire_storage.core.residency.ledger import Ledger
from quire_storage.core.residency.writes import Writes
from tests.unit.storage.residency_answers import Answers
from tests.unit.storage.residency_histories import History

_FINDS_LOST_MARK = 1466
"""The first of hundreds of seeds to find it; where a change of the machine moves that, the search takes a minute."""


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (50, 100, 150))])
def test_long_histories(first: int) -> None:
    seeds = range(first, first + 50 * int(os.environ.get("QUIRE_SOAK_FACTOR", "1")))
    assert next(filter(None, map(_fault, seeds)), "") == ""


@pytest.mark.parametrize("seed", [566, 1372])
def test_a_copy_whose_header_is_being_written_stays_somewhere(seed: int) -> None:
    """Its drive was lost, and the object tier has it: it gave up its slot, and could be read from nowhere."""
    assert _fault(seed) == ""


def _fault(seed: int) -> str:
    """What a history shows to be wrong; empty for nothing."""
    try:
        History(seed).run()
    except Exception:
        return f"seed {seed}:\n{traceback.format_exc()}"
    return ""


def test_long_histories_find_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark of what lies in memory alone, lost as it was when another copy of the key was written."""
    written = Writes.written

    def faulty(writes: Writes, event: ev.Written) -> None:
        write = writes.running.get(event.write)
        keys = [entry.key for entry in write.entries] if write is not None else []
        written(writes, event)
        for key in keys:
            writes._copies.dirty.pop(key, None)

    monkeypatch.setattr(Writes, "written", faulty)
    with pytest.raises(AssertionError, match="what lies in memory only is to be written"):
        for seed in (_FINDS_LOST_MARK, *range(700, 2000)):
            History(seed).run()


def test_long_histories_find_a_drop_that_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy had left before its write was begun: no header was to be taken off a drive, and none was waited for."""
    monkeypatch.setattr(Departures, "off_drive", lambda departures, entry, error=None: None)
    with pytest.raises(AssertionError, match="what is asked is answered"):
        for seed in range(200):
            History(seed).run()


def test_long_histories_find_a_slot_that_is_freed_under_a_follower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the invariant that says so: a later store writes there, and the follower reads its bytes."""
    monkeypatch.setattr(Ledger, "follow", lambda ledger, offsets, holder: None)
    monkeypatch.setattr(Answers, "_check", lambda answers, asked, value: None)
    with pytest.raises(AssertionError, match="a follower reads the bytes of its store"):
        for seed in range(200):
            History(seed).run()
