"""Failures that repeat: once, then by their count, and once more when they have ended."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import structlog

from quire_server.telemetry.log_dedup import LogDedup


class _Log:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.repeats = LogDedup(lambda: self.now_s)
        self.lines: list[dict[str, Any]] = []

    def say(self, event: str, level: str = "warning", **fields: object) -> None:
        with contextlib.suppress(structlog.DropEvent):
            self.lines.append(dict(self.repeats(None, "", {"event": event, "level": level, **fields})))

    def look(self) -> None:
        self.lines += self.repeats.ended()


def test_a_failure_that_repeats_is_logged_by_its_count() -> None:
    log = _Log()
    for tick in range(100 * 10):  # ten times a second, each with another number in it
        log.now_s = tick / 10
        log.say("the leader is unknown", error=f"Redis: connection {tick} refused")
        log.say("another", node="a")
        log.look()
    assert [line.get("repeated") for line in log.lines if line["event"] == "the leader is unknown"] == [None, 600]
    log.now_s += 11
    log.look()
    last = [line for line in log.lines if line["event"] == "the leader is unknown"][-1]
    assert (last["ended"], last["repeated"]) == (True, 399)
    log.say("the leader is unknown", error="Redis: connection 7 refused")
    assert "repeated" not in log.lines[-1], "it begins anew"


def test_what_differs_is_no_repetition() -> None:
    log = _Log()
    for node in "abc":
        log.say("a node could not be told", node=node)
    log.say("a node could not be told", node="a", level="info")
    log.say("a node could not be told", node="a", level="info")
    assert len(log.lines) == 5
    log.now_s = 20
    log.look()
    assert len(log.lines) == 5, "what came once has no end"


@pytest.mark.parametrize("count", [1, 3])
def test_only_what_was_left_out_is_told_of(count: int) -> None:
    log = _Log()
    for _ in range(count):
        log.say("x")
    log.now_s = 11
    log.look()
    assert len(log.lines) == (1 if count == 1 else 2)
