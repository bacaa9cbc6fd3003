"""Clients of the public frontend, in a process of their own: `python -m tests.chaos.load FILE`, with a job as JSON.

Works until SIGTERM; each request and its answer becomes a line of the history.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from quire.client import AsyncClient
from quire.model.durability import Durability
from quire.model.errors import QuireError, by_code
from tests.chaos import history
from tests.chaos.history import DEADLINE_S, Event
from tests.e2e import s3_signing
from tests.e2e.helpers import fetch_all, store

_LEVELS = (Durability.MEMORY, Durability.LOCAL, Durability.LOCAL, Durability.REPLICATED, Durability.OBJECT)
_CHUNKS_MAX = 10


class Worker:
    """One of several; its prefixes are its own, what it reads may be another's."""

    def __init__(self, job: dict[str, Any], index: int, stored: dict[int, int]) -> None:
        self._job = job
        self._index = index
        self._stored = stored
        self._random = random.Random(f"{job['seed']} {index}")
        self._next = index * 10_000
        self._file = Path(job["history"])
        self._seed = int(job["seed"])
        self._objects: list[int] = []

    async def work(self, client: AsyncClient, stop: asyncio.Event) -> None:
        while not stop.is_set():
            choice = self._random.random()
            if choice < 0.3 or not self._stored:
                await self._store(client)
            elif choice < 0.8 or not self._job["s3"]:
                await self._fetch(client)
            else:
                await self._object()
            await asyncio.sleep(self._random.uniform(0.0, 0.05))

    async def _store(self, client: AsyncClient) -> None:
        self._next += 1
        prefix, chunks = self._next, self._random.randint(1, _CHUNKS_MAX)
        level = self._random.choice(_LEVELS)

        async def work() -> int:
            payload = history.payload_of(self._seed, prefix, chunks)
            keys = history.keys_of(self._seed, prefix, chunks)
            summary = await store(client, history.namespace(self._seed), keys, payload, durability=level)
            return summary.stored_chunks + summary.known_chunks

        event = await self._tried("store", prefix, chunks, level.name, work())
        if not event.error:
            assert event.got == chunks, "a store that is acknowledged in part says so"
            self._stored[prefix] = chunks

    async def _fetch(self, client: AsyncClient) -> None:
        prefix = self._random.choice(list(self._stored))
        chunks = self._stored[prefix]

        async def work() -> int:
            found = await client.lookup(history.namespace(self._seed), history.keys_of(self._seed, prefix, chunks))
            if not found.matched_chunks:
                return 0
            try:
                got, summary = await fetch_all(client, found)
            finally:
                await client.release(found)
            expected = history.payload_of(self._seed, prefix, chunks)[:, : found.matched_chunks]
            if not np.array_equal(got[:, : summary.usable_chunks], expected[:, : summary.usable_chunks]):
                raise WrongBytes
            for outcome in summary.outcomes:  # a node may die between its last layer and its last word
                if outcome.error_code:
                    raise by_code(outcome.error_code)(outcome.error_message)
            return summary.usable_chunks

        await self._tried("fetch", prefix, chunks, "", work())

    async def _object(self) -> None:
        """Put, get or delete one of this worker's own."""
        choice = self._random.random()
        url, key = f"http://{self._job['s3_address']}/chaos", tuple(self._job["key"])
        if choice < 0.4 or not self._objects:
            self._next += 1
            name, body = self._next, history.object_of(self._seed, self._next)

            async def work() -> int:
                status, _, _ = await s3_signing.request("PUT", f"{url}/{name}", key, body=body)
                return _ok(status, len(body))

            event = await self._tried("put", name, 0, "", work())
            if not event.error:
                self._objects.append(name)
        elif choice < 0.85:
            name = self._random.choice(self._objects)

            async def work() -> int:
                status, _, got = await s3_signing.request("GET", f"{url}/{name}", key)
                if status == 200 and got != history.object_of(self._seed, name):
                    raise WrongBytes
                return _ok(status, len(got))

            await self._tried("get", name, 0, "", work())
        else:
            name = self._objects.pop(self._random.randrange(len(self._objects)))

            async def work() -> int:
                status, _, _ = await s3_signing.request("DELETE", f"{url}/{name}", key)
                return _ok(status, 0)

            await self._tried("delete", name, 0, "", work())

    async def _tried(self, op: str, prefix: int, chunks: int, level: str, work: Awaitable[int]) -> Event:
        began_s, got, error, wrong = time.monotonic(), 0, "", False
        try:
            async with asyncio.timeout(DEADLINE_S):
                got = await work
        except QuireError as failed:
            error = failed.code()
        except WrongBytes:
            wrong = True
        except TimeoutError:
            error = history.NO_ANSWER
        except Refused as failed:
            error = f"HTTP {failed.args[0]}"
        except (OSError, aiohttp.ClientError):
            error = "connection"
        except Exception as failed:
            error = repr(failed)
        event = Event(op, prefix, chunks, level, began_s, time.monotonic(), got, error, wrong)
        history.write(self._file, event)
        return event


class WrongBytes(Exception):
    """What must never happen."""


class Refused(Exception):
    """An S3 request that was answered with an error; its status."""


def _ok(status: int, size: int) -> int:
    if status >= 300:
        raise Refused(status)
    return size


async def main(job: dict[str, Any]) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    stored: dict[int, int] = {}
    async with AsyncClient(job["gateway"], timeout_s=DEADLINE_S - 2) as client:
        workers = [Worker(job, index, stored).work(client, stop) for index in range(1, job["workers"] + 1)]
        await asyncio.gather(*workers)


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
