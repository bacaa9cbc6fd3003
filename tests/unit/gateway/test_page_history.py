"""Time series of the page: rates between samples, restarts of members, gaps, and the average over a day."""

from __future__ import annotations

from collections.abc import Sequence

from quire.model.errors import NodeUnavailable
from quire.model.nodes import DecoderInfo, Node, StorageInfo
from quire.testing import FakeClock
from quire_gateway.page.history import History


class _Cluster:
    """A storage node and a decoder that count what they do."""

    def __init__(self) -> None:
        self.delivered, self.images, self.incarnation, self.is_away = 0.0, 0.0, "one", False
        self.counts = {("n", "hit"): 0, ("n", "miss"): 0}

    async def members(self) -> Sequence[Node]:
        if self.is_away:
            raise NodeUnavailable("no orchestrator")
        stats = {"delivered bytes": self.delivered, "ingested bytes": 0.0}
        return [
            Node(node_id="s", about=StorageInfo(), incarnation=self.incarnation, stats=stats),
            Node(node_id="d", about=DecoderInfo(), incarnation="one", stats={"requests": self.images}),
        ]


async def test_rates_restarts_and_gaps() -> None:
    cluster, clock = _Cluster(), FakeClock()
    history = History(cluster.members, lambda: cluster.counts, clock)
    history.start()
    await clock.advance(0.0)
    cluster.delivered, cluster.images, cluster.counts = 1000.0, 10.0, {("n", "hit"): 3, ("n", "miss"): 1}
    await clock.advance(5.0)
    await clock.advance(5.0)  # nothing happens
    cluster.incarnation, cluster.delivered = "two", 400.0
    await clock.advance(5.0)
    cluster.is_away = True
    await clock.advance(5.0)
    cluster.is_away = False
    await clock.advance(5.0)
    cluster.delivered = 900.0
    await clock.advance(5.0)
    shown = history.shown(day=False)
    assert shown["series"] == {
        "delivered": [200.0, 0.0, 0.0, None, 100.0],
        "stored": [0.0, 0.0, 0.0, None, 0.0],
        "hit_rate": [0.75, None, None, None, None],
        "images": [2.0, 0.0, 0.0, None, 0.0],
    }
    times = shown["times_ms"]
    assert isinstance(times, list) and len(times) == 5 and times == sorted(times)
    await history.close()


async def test_an_hour_and_a_day_are_kept() -> None:
    cluster, clock = _Cluster(), FakeClock()
    history = History(cluster.members, lambda: cluster.counts, clock)
    history.start()
    await clock.advance(0.0)
    for _ in range(1000):
        cluster.delivered += 500.0
        await clock.advance(5.0)
    hour, day = history.shown(day=False), history.shown(day=True)
    assert isinstance(hour["series"], dict) and isinstance(day["series"], dict)
    assert hour["series"]["delivered"] == [100.0] * 720
    assert day["series"]["delivered"] == [100.0] * (1000 // 24) and day["series"]["hit_rate"][0] is None
    await history.close()
