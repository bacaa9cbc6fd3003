"""How long Redis takes to answer, once a second, without the time by which this process is late itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, Final, cast

import redis.asyncio as redis

from quire.model.errors import QuireError
from quire.telemetry import background, counter, meter, names
from quire_server import tasks
from quire_server.readiness import readiness
from quire_server.redis.connection import metadata_errors
from quire_server.telemetry.loop_lag import lateness

_EACH_S: Final = 1.0
_REDIS: Final = "Redis"


class RedisProbe:
    """A PING a second, as a metric. Callers of Redis find out on their own that it is away."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._round_trip = meter().create_histogram(
            names.REDIS_ROUND_TRIP,
            "s",
            "time that Redis takes to answer",
            explicit_bucket_boundaries_advisory=names.SECONDS,
        )
        self._failures = counter(names.REDIS_FAILURES, "1", "probes of Redis that failed")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin. The service is ready once Redis has answered."""
        readiness.wait(_REDIS, "it has not answered yet")
        self._task = asyncio.create_task(self._run(), context=background())

    async def close(self) -> None:
        await tasks.end([self._task])

    async def _run(self) -> None:
        answered = False
        while True:
            await asyncio.sleep(0)  # a tick that is due is counted first
            began_s, late_s = time.perf_counter(), lateness.total_s
            try:
                async with metadata_errors():
                    await cast(Awaitable[Any], self._client.ping())
                took_s = time.perf_counter() - began_s
                await asyncio.sleep(0)  # a tick that was due meanwhile is counted first
                self._round_trip.record(max(0.0, took_s - (lateness.total_s - late_s)))
                answered = True
                readiness.reached(_REDIS)
            except QuireError as error:
                self._failures.add(1)
                if not answered:
                    readiness.wait(_REDIS, str(error))
            await asyncio.sleep(_EACH_S)
