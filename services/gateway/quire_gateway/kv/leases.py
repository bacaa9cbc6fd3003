"""Leases that the gateway takes itself, for the length of one request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from quire.model.errors import QuireError
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.telemetry import background, logger
from quire_server.lookups import LookupAnswer, Lookups, Question

_TTL_MS: Final = 60_000


class Leases:
    """Given back after the answer: a client that has its bytes need not wait for that."""

    def __init__(self, lookups: Lookups) -> None:
        self._lookups = lookups
        self._releasing: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def held(self, namespace: Namespace, keys: ChunkKeys) -> AsyncIterator[LookupAnswer]:
        """Look up the stored part of the keys, pinned."""
        leased = await self._lookups.lookup(Question(namespace, keys, _TTL_MS))
        try:
            yield leased
        finally:
            if leased.token:
                releasing = asyncio.create_task(self._release(leased.token), context=background())
                self._releasing.add(releasing)
                releasing.add_done_callback(self._releasing.discard)

    async def close(self) -> None:
        """Give back the remaining leases."""
        await asyncio.gather(*self._releasing, return_exceptions=True)

    async def _release(self, lease: bytes) -> None:
        try:
            await self._lookups.release(lease)
        except QuireError as error:
            logger().warning("a lease stays until it runs out", error=str(error))
