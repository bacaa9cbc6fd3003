"""Time series of the cluster's work, which a gateway keeps for its page: the last hour, and the last day."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from quire.model.errors import QuireError
from quire.model.nodes import Node, Role
from quire.telemetry import background
from quire_server import tasks
from quire_server.clock import Clock

_STEP_S: Final = 5.0
_SAMPLES: Final = 720
_AVERAGED: Final = 24
_MEMBER_S: Final = 0.01
"""Of a large cluster: the more members, the longer a step."""
Values = dict[str, float | None]
SERIES: Final = ("delivered", "stored", "hit_rate", "images")
"""Bytes a second that storage nodes deliver and take, share of the chunks that look-ups of this gateway found, images a
second."""


@dataclass(slots=True)
class _Ring:
    """Samples with their times (Unix epoch, ms), the last `_SAMPLES` of them."""

    times_ms: deque[int] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    values: deque[Values] = field(default_factory=lambda: deque(maxlen=_SAMPLES))

    def add(self, at_ms: int, values: Values) -> None:
        self.times_ms.append(at_ms)
        self.values.append(values)


class History:
    """`members`: returns all of them with their stats.

    `counts`: chunks that look-ups asked this gateway for, by namespace's tag and whether they were hits.
    """

    def __init__(
        self,
        members: Callable[[], Awaitable[Sequence[Node]]],
        counts: Callable[[], Mapping[tuple[str, str], int]],
        clock: Clock,
    ) -> None:
        self._members = members
        self._counts = counts
        self._clock = clock
        self._hour, self._day = _Ring(), _Ring()
        self._recent: list[Values] = []
        self._previous: tuple[float, dict[tuple[str, str], Node], dict[str, int]] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), context=background())

    async def close(self) -> None:
        await tasks.end([self._task])

    def shown(self, *, day: bool) -> dict[str, object]:
        """Return the times (Unix epoch, ms) and series of an hour, or of a day; null where a value is unknown."""
        ring = self._day if day else self._hour
        series = {name: [values[name] for values in ring.values] for name in SERIES}
        return {"times_ms": list(ring.times_ms), "series": series}

    async def _run(self) -> None:
        while True:
            count = 0
            try:
                count = self._sample(await self._members())
            except QuireError:  # a gap; the page says that the cluster does not answer
                self._previous = None
                self._keep(dict.fromkeys(SERIES))
            await self._clock.sleep(max(_STEP_S, _MEMBER_S * count))

    def _sample(self, members: Sequence[Node]) -> int:
        """Keep the rates since the previous sample; return how many members there are."""
        now_s, nodes = self._clock.monotonic_s(), {(node.node_id, node.incarnation): node for node in members}
        lookups = {"hit": 0, "miss": 0}
        for (_, result), chunks in self._counts().items():
            lookups[result] += chunks
        if self._previous is not None:
            then_s, old_nodes, old_lookups = self._previous
            seconds = max(0.1, now_s - then_s)

            def rate(role: Role, stat: str) -> float:
                """Add up the rates of the processes of the previous sample: counters of others began anew."""
                names = [name for name in nodes.keys() & old_nodes.keys() if nodes[name].role is role]
                pairs = [(nodes[name].stats.get(stat, 0), old_nodes[name].stats.get(stat, 0)) for name in names]
                return sum(max(0.0, value - old_value) for value, old_value in pairs) / seconds

            hits, misses = (lookups[result] - old_lookups[result] for result in ("hit", "miss"))
            self._keep(
                {
                    "delivered": rate(Role.STORAGE, "delivered bytes"),
                    "stored": rate(Role.STORAGE, "ingested bytes"),
                    "hit_rate": hits / (hits + misses) if hits + misses else None,
                    "images": rate(Role.DECODER, "requests"),
                }
            )
        self._previous = now_s, nodes, lookups
        return len(members)

    def _keep(self, values: Values) -> None:
        at_ms = self._clock.now_ms()
        self._hour.add(at_ms, values)
        self._recent.append(values)
        if len(self._recent) == _AVERAGED:
            self._day.add(at_ms, {name: _mean([values[name] for values in self._recent]) for name in SERIES})
            self._recent = []


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None
