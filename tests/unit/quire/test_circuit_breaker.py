"""A Quire that does not answer is left alone for a while; a request that is at fault itself costs only itself."""

from __future__ import annotations

import pytest

from quire.integrations.circuit_breaker import CircuitBreaker
from quire.model.errors import ConfigInvalid, KeysInvalid, QuireError, Unavailable


def test_each_failure_doubles_the_pause() -> None:
    now_s = [0.0]
    absence = CircuitBreaker(2.0, "an engine", lambda: now_s[0])
    assert not absence
    for pause_s in (2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        absence.failed(Unavailable("away"))
        now_s[0] += pause_s - 0.1
        assert absence
        now_s[0] += 0.2
        assert not absence
    absence.answered()
    absence.failed(TimeoutError())
    now_s[0] += 2.1
    assert not absence


@pytest.mark.parametrize("error", [KeysInvalid("twice"), ConfigInvalid("no prefix"), ValueError("no hexadecimal")])
def test_a_request_that_is_at_fault_is_a_miss_for_itself(error: QuireError | ValueError) -> None:
    absence = CircuitBreaker(2.0, "an engine")
    absence.failed(error)
    assert not absence
