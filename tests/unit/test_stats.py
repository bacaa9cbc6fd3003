"""Stats as instruments: one look at the node for each scrape, and a bounded number of series."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.metrics import CallbackOptions, Observation

from quire.telemetry.names import STATS
from quire_server.telemetry import stats


class _Meter:
    def __init__(self) -> None:
        self.callbacks: dict[str, Any] = {}

    def create_observable_gauge(self, name: str, callbacks: list[Any], unit: str, doc: str) -> None:
        (self.callbacks[name],) = callbacks

    create_observable_counter = create_observable_gauge

    def scrape(self) -> dict[str, list[Observation]]:
        return {name: list(callback(CallbackOptions())) for name, callback in self.callbacks.items()}


def test_a_scrape_reads_once_and_tells_the_largest_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every instrument used to read all stats anew: thirty walks over the chunks of a node."""
    meter, now_s, reads = _Meter(), [0.0], []
    monkeypatch.setattr(stats, "meter", lambda: meter)

    def read() -> dict[str, float]:
        reads.append(now_s[0])
        tenants = {f"tenant.t{number}.bytes": float(number) for number in range(1000)}
        return {"chunks": 7.0 * len(reads), "memory MiB": 2.0, **tenants}

    stats.publish(read, lambda: now_s[0])
    found = meter.scrape()
    assert len(meter.callbacks) == len(STATS) and len(reads) == 1
    assert [each.value for each in found["quire.storage.chunks"]] == [7.0]
    assert [each.value for each in found["quire.storage.memory"]] == [2.0 * 2**20]
    assert not found["quire.storage.disk"]
    tenants = {dict(each.attributes or {})["tenant"]: each.value for each in found["quire.gateway.tenant.bytes"]}
    assert len(tenants) == 65 and tenants["t999"] == 999
    assert sum(tenants.values()) == sum(range(1000)) and tenants["others"] == sum(range(936))
    now_s[0] = 1.0
    assert [each.value for each in meter.scrape()["quire.storage.chunks"]] == [14.0] and len(reads) == 2
