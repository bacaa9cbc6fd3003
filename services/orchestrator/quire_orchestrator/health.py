"""Verdict on the cluster: the checks of its members, and those that only an orchestrator can make."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Final

from quire.model.errors import QuireError
from quire.model.health import Check, Verdict, certificate_checks, failed_checks, unreachable, verdict_of
from quire.model.nodes import Node
from quire_orchestrator.cluster import Cluster
from quire_orchestrator.ports import Clock, RedisState
from quire_server import tasks
from quire_server.telemetry.build_info import CertificateLife

_EACH_S: Final = 15.0
_FULL, _NEARLY_FULL = 0.95, 0.8
_REDIS_ADVICE: Final = "correct the setting (docs/operations/redis.md)"


class Health:
    """`certificates`: this orchestrator's own."""

    def __init__(self, *, cluster: Cluster, redis: RedisState, certificates: CertificateLife, clock: Clock) -> None:
        self._cluster = cluster
        self._redis = redis
        self._certificates = certificates
        self._clock = clock
        self._last: list[Check] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        await tasks.end([self._task])

    @property
    def stats(self) -> dict[str, float]:
        """The last verdict (0: OK, 1: WARN, 2: ERR), and how often each check failed; nothing before the first."""
        if self._last is None:
            return {}
        codes = Counter(check.code for check in self._last)
        return {"health": verdict_of(self._last).value, **{f"failed.{code}": count for code, count in codes.items()}}

    def checks(self, nodes: Sequence[Node]) -> list[Check]:
        """Return the checks that the cluster fails, the worst first. `nodes`: its members, and those that are away."""
        own = certificate_checks(self._certificates.days, owner="an orchestrator")  # it is no member
        checks = [*failed_checks(nodes), *self._of_redis(), *self._of_refused(), *own]
        return sorted(checks, key=lambda check: -check.verdict.value)

    def _of_redis(self) -> list[Check]:
        checks = [
            Check("REDIS_UNSAFE", Verdict.WARN, "", f"Redis may lose acknowledged data: {problem}", _REDIS_ADVICE)
            for problem in self._redis.problems
        ]
        share = self._redis.share or 0.0
        if share >= _NEARLY_FULL:
            verdict = Verdict.ERR if share >= _FULL else Verdict.WARN
            problem = f"Redis has used {share:.0%} of its maxmemory; when it is full it refuses stores"
            checks.append(Check("REDIS_FULL", verdict, "", problem, "more memory, or a Redis Cluster"))
        return checks

    def _of_refused(self) -> list[Check]:
        advice = "give it another name, the cluster's secret, or the cluster's release; its log has the same reason"
        return [
            Check("MEMBER_REFUSED", Verdict.WARN, node_id, f"it is refused: {reason}", advice)
            for node_id, reason in self._cluster.refused().items()
        ]

    async def _run(self) -> None:
        while True:
            try:
                self._last = self.checks(await self._cluster.nodes(None, with_away=True))
            except QuireError as error:
                self._last = [unreachable(f"{error.code()}: {error}")]
            await self._clock.sleep(_EACH_S)
