"""Waiting for processes that work slowly, and not for those that do nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quire_tools.local import patience
from quire_tools.local.patience import Patience


class Clock:
    """Time, and the processor's of a process, as the test sets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.worked_s = 0.0, 0.0
        monkeypatch.setattr("quire_tools.local.patience.time.monotonic", lambda: self.now_s)
        monkeypatch.setattr(patience, "_processor_s", lambda pid: self.worked_s)

    def ends_s(self, awaited: Patience, share: float, until_s: float = 1e4) -> float:
        """Return when it is over, with a process that has this share of a processor."""
        while not awaited.is_over and self.now_s < until_s:
            self.now_s += 0.5
            self.worked_s += 0.5 * share
        return self.now_s


@pytest.mark.parametrize(("share", "ends_s"), [(0.0, 10), (0.01, 10), (0.1, 100), (1.0, 100)])
def test_one_that_works_is_waited_for(share: float, ends_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle services take a hundredth of a processor; one that is busy for ever is given up as well."""
    clock = Clock(monkeypatch)
    assert clock.ends_s(Patience(10, 1), share) == pytest.approx(ends_s, abs=1)


def test_the_limit_begins_anew_after_the_last_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    awaited = Patience(10, 1)
    assert clock.ends_s(awaited, 0.5, until_s=40) == 40 and not awaited.is_over
    assert 45 <= clock.ends_s(awaited, 0.0) <= 56


@contextmanager
def _process(code: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def test_the_processors_time_of_a_real_process() -> None:
    with _process("while True: pass") as busy, _process("import time; time.sleep(600)") as idle:
        until_s = time.monotonic() + 60
        while patience._processor_s(busy) < 0.2:
            assert time.monotonic() < until_s, "it has had no time"
            time.sleep(0.01)
        assert patience._processor_s(idle) < 0.2
    assert patience._processor_s(busy) == 0.0, "it is gone"
