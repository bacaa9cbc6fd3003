"""The clock that members of a cluster share."""

from __future__ import annotations

from typing import Any

import pytest

from quire.model.errors import MetadataUnavailable
from quire.model.hashing import Namespace
from quire.model.index import Match, Pin, PlacedRun
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.model.profile import Profiles
from quire.testing import FakeClock
from quire_gateway.kv.retention import Retention
from quire_server.clock import ClusterClock, end_ms
from quire_server.lookups import Lookups, LookupSettings, Question

_REDIS_MS = 1_700_000_000_000


class _SteppingClock(FakeClock):
    """A machine whose wall clock is wrong, and is stepped."""

    off_ms = -240_000

    def now_ms(self) -> int:
        return super().now_ms() + self.off_ms


async def test_the_clock_of_redis_counts_from_the_first_answer_on() -> None:
    own = _SteppingClock()
    clock = ClusterClock(own)
    assert clock.now_ms() == own.now_ms()
    clock.follow(_REDIS_MS, own.monotonic_s())
    await own.advance(2.5)
    own.off_ms = 600_000
    assert clock.now_ms() == _REDIS_MS + 2500


async def test_an_answer_that_was_long_under_way_does_not_count_beside_a_quick_one() -> None:
    own = FakeClock()
    clock = ClusterClock(own)
    clock.follow(_REDIS_MS, own.monotonic_s() - 0.002)
    assert clock.now_ms() == _REDIS_MS + 1, "half of the way back"
    await own.advance(1.0)
    clock.follow(_REDIS_MS + 1000, own.monotonic_s() - 1.0)
    assert clock.now_ms() == _REDIS_MS + 1001


async def test_clocks_drift_so_that_an_old_answer_yields() -> None:
    own = FakeClock()
    clock = ClusterClock(own)
    clock.follow(_REDIS_MS, own.monotonic_s())
    await own.advance(100.0)
    clock.follow(_REDIS_MS + 100_050, own.monotonic_s() - 0.02)
    assert clock.now_ms() == _REDIS_MS + 100_060


class _Redis:
    """Its clock, and an index that holds all chunks."""

    def __init__(self) -> None:
        self.reads, self.down, self.pins = 0, False, list[Pin]()

    async def now_ms(self) -> int:
        if self.down:
            raise MetadataUnavailable("Redis is away")
        self.reads += 1
        return _REDIS_MS

    async def match(self, keys: ChunkKeys, pin: Pin | None = None) -> Match:
        assert pin is not None
        self.pins.append(pin)
        return Match((PlacedRun(len(keys), ("a",)),), False)

    async def unpin(self, *arguments: bytes) -> bool:
        return True

    async def refresh(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        """An empty picture of the cluster."""
        if name in ("live", "link_rates"):
            return {}
        return lambda *arguments: {}


async def test_pins_before_the_first_heartbeat_end_by_the_clock_of_redis() -> None:
    """A gateway that had just started with a wrong clock gave retentions that were over (simulated seed 201)."""
    redis: Any = _Redis()
    clock = ClusterClock(_SteppingClock(), redis.now_ms)
    namespace = Namespace("m", "1", KvLayout(2, 16, 1, 32, Dtype.FP16))
    keys = ChunkKeys(bytes(32))
    retention = Retention(redis, clock, 60)
    settings = LookupSettings(secrets=(b"s",))
    lookups = Lookups(settings=settings, index=redis, view=redis, profiles=Profiles(None), clock=clock)
    redis.down = True
    with pytest.raises(MetadataUnavailable):
        await retention.retain(namespace, keys, 5_000)
    redis.down = False
    assert await retention.retain(namespace, keys, 5_000) == (1, end_ms(_REDIS_MS, 5_000))
    await lookups.lookup(Question(namespace, keys, lease_ttl_ms=3_000))
    assert [pin.expires_ms for pin in redis.pins] == [end_ms(_REDIS_MS, 5_000), end_ms(_REDIS_MS, 3_000)]
    assert redis.reads == 1, "once"


@pytest.mark.parametrize("given_ms", [1000.0, 1000.4, 1000.999])
def test_a_lease_lasts_as_long_as_it_says_by_an_exact_clock(given_ms: float) -> None:
    """A retention ended 0.13 ms early (simulated seed 1327): times are rounded down to milliseconds twice."""
    read_ms = int(int(given_ms) - 0.001)  # of Redis in whole milliseconds, then estimated in whole milliseconds
    assert end_ms(read_ms, 50) >= given_ms + 50


async def test_an_orchestrator_of_before_says_no_time() -> None:
    own = FakeClock()
    clock = ClusterClock(own)
    clock.follow(0, own.monotonic_s())
    assert clock.now_ms() == own.now_ms()
