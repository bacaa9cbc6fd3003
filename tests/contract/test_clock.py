"""The machine's clock, and the one that stands still until it is told otherwise."""

from __future__ import annotations

import asyncio

import pytest

from quire.testing import FakeClock
from quire.testing.contracts import ClockContract
from quire.testing.contracts.clock import Elapse
from quire_server.clock import Clock, ClusterClock, SystemClock


class TestClock(ClockContract):
    @pytest.fixture(params=[SystemClock, FakeClock, lambda: ClusterClock(SystemClock())])
    def clock(self, request: pytest.FixtureRequest) -> Clock:
        made: Clock = request.param()
        return made

    @pytest.fixture
    def elapse(self, clock: Clock) -> Elapse:
        return clock.advance if isinstance(clock, FakeClock) else asyncio.sleep
