"""New records are sent to their owner's cache: an image is requested soon after it was made."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

from quire.model.errors import QuireError
from quire.model.images import ImageEntry
from quire.telemetry import background, logger
from quire_gateway.images.owners import ImageOwners
from quire_gateway.ports import Decoders

_TASKS_MAX: Final = 16


class Warming:
    """Sends records after the PUT was answered, at most sixteen at a time; the rest are fetched on request.

    `lend`: a context manager that copies bytes into registered memory and yields its `RdmaTarget`.
    """

    def __init__(self, owners: ImageOwners, decoders: Decoders, lend: Callable[[bytes], Any]) -> None:
        self._owners = owners
        self._decoders = decoders
        self._lend = lend
        self._tasks: set[asyncio.Task[None]] = set()

    def stored(self, entry: ImageEntry, record: bytes) -> None:
        """Send a record that was just stored."""
        if len(self._tasks) >= _TASKS_MAX:
            return
        task = asyncio.create_task(self._warm(entry, record), context=background())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _warm(self, entry: ImageEntry, record: bytes) -> None:
        owner = self._owners.owner(entry.record_name)
        if owner is None:
            return
        with contextlib.suppress(asyncio.CancelledError):
            try:
                with self._lend(record) as loan:
                    await self._decoders.warm(owner.grpc_address, entry, loan, len(record))
            except QuireError as error:
                logger().info("a new image is not cached", decoder=owner.node_id, error=str(error))
