"""Checks whether Redis is configured to keep its data, and how full it is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import redis.asyncio as redis
from opentelemetry.metrics import CallbackOptions, Observation
from redis.asyncio.cluster import RedisCluster

from quire.model.errors import QuireError
from quire.telemetry import background, logger, meter, names
from quire_server import tasks
from quire_server.redis.connection import is_cluster, metadata_errors

_EACH_S: Final = 15.0


def warnings(info: Mapping[str, Any]) -> list[str]:
    """Return the settings in a Redis' INFO that may lose names of images and S3 objects, which are nowhere else."""
    problems = []
    policy = info.get("maxmemory_policy", "noeviction")
    if info.get("maxmemory", 0) and policy != "noeviction":
        problems.append(f"maxmemory-policy is {policy}: a full Redis drops records; set noeviction")
    if not info.get("aof_enabled", 1):
        problems.append("appendonly is off: a restart loses what came after the last snapshot; set appendonly yes")
    return problems


def fullness(info: Mapping[str, Any]) -> float:
    """Used share of `maxmemory`, 0 to 1; 0 where none is set."""
    return info.get("used_memory", 0) / info["maxmemory"] if info.get("maxmemory") else 0.0


class RedisCapacity:
    """Checks Redis, or each master of a Redis Cluster, every 15 s.

    Its memory becomes metrics. `problems`: settings that lose records, as of the last look; they are logged when they
    change.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._used: float | None = None
        self._share: float | None = None
        self.problems: list[str] = []
        self._task: asyncio.Task[None] | None = None
        meter().create_observable_gauge(names.REDIS_MEMORY, [self._observe_used], "By", "memory that Redis uses")
        meter().create_observable_gauge(
            names.REDIS_FULLNESS,
            [self._observe_share],
            "1",
            "used share of maxmemory of the fullest master; 0: no limit",
        )

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), context=background())

    async def close(self) -> None:
        await tasks.end([self._task])

    async def _run(self) -> None:
        while True:
            try:
                self._look(await self._infos())
            except QuireError as error:
                self._used = self._share = None
                logger().warning("Redis does not say how it is set up and how full it is (INFO)", error=str(error))
            await asyncio.sleep(_EACH_S)

    async def _infos(self) -> dict[str, Mapping[str, Any]]:
        """INFO by node."""
        client: Any = self._client
        async with metadata_errors():
            if is_cluster(client):
                answers: dict[str, Mapping[str, Any]] = await client.info(target_nodes=RedisCluster.PRIMARIES)
                # Of a single master redis-py gives the answer itself.
                return {"": answers} if "used_memory" in answers else answers
            return {"": await client.info()}

    def _look(self, infos: Mapping[str, Mapping[str, Any]]) -> None:
        self._used = sum(info.get("used_memory", 0) for info in infos.values())
        self._share = max(map(fullness, infos.values()), default=0.0)
        problems = sorted({warning for info in infos.values() for warning in warnings(info)})
        if problems and problems != self.problems:
            logger().warning("Redis may lose acknowledged data", problems=problems)
        self.problems = problems

    @property
    def share(self) -> float | None:
        """Used share of `maxmemory` of the fullest master, 0 without a limit; None while Redis does not answer."""
        return self._share

    def _observe_used(self, options: CallbackOptions) -> list[Observation]:
        return [] if self._used is None else [Observation(self._used)]

    def _observe_share(self, options: CallbackOptions) -> list[Observation]:
        return [] if self._share is None else [Observation(self._share)]
