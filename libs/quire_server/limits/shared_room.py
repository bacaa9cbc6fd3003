"""Room that tenants share, for which callers wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from quire.model.errors import TooManyRequests
from quire_server.core.shares import SharedBound


class SharedRoom:
    """A `SharedBound` whose callers wait for room instead of being refused at once."""

    def __init__(self, total: int) -> None:
        self._bound = SharedBound(total)
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def taken(self) -> int:
        """Return the sum over all tenants."""
        return self._bound.taken

    @contextlib.asynccontextmanager
    async def held(self, tenant: str, amount: int, wait_s: float) -> AsyncIterator[None]:
        """Hold an amount for a tenant.

        Raises:
            TooManyRequests: The tenant's share had no room for `wait_s` seconds.
        """
        try:
            async with asyncio.timeout(wait_s) as limit:
                while not self._bound.take(tenant, amount):
                    await self._change()
                limit.reschedule(None)
        except TimeoutError:
            raise TooManyRequests("other answers of this tenant are not read", retry_after_s=1.0) from None
        try:
            yield
        finally:
            self._bound.give_back(tenant, amount)
            for future in self._waiting:
                if not future.done():
                    future.set_result(None)

    async def _change(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)
