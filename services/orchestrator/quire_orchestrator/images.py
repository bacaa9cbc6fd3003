"""Images: the catalogue, and which decoder makes what."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from opentelemetry.trace import SpanKind

from quire.model.errors import ImageMissing, InvalidRequest, QuireError, QuotaExceeded
from quire.model.images import ExpectedImage, ImageEntry, check_image_id, record_keys
from quire.model.keys import ChunkKeys
from quire.model.nodes import Node
from quire.model.policy import ENTRY_BYTES
from quire.telemetry import logger, names, tracer
from quire_orchestrator.core.routing import Route, build_of, candidate
from quire_orchestrator.ports import Catalogue, Clock, Decodes, TenantQuotas
from quire_server import tasks
from quire_server.core.placement import rendezvous

LIST_MAX = 1000
_SWEEP_S = 15.0
_SWEEP_MAX = 200


class ImageDesk:
    """Every method is one request, for a tenant: it has ids of its own.

    `theta`: requests for each device of an image's owner above which another decoder makes it. `evict`: drops a chunk
    that no lease pins; whether it is stored no more. `quotas`: None for no limits.
    """

    def __init__(
        self,
        *,
        catalogue: Catalogue,
        decodes: Decodes,
        theta: int,
        decoders: Callable[[], list[Node]],
        evict: Callable[[ChunkKeys], Awaitable[bool]],
        clock: Clock,
        quotas: TenantQuotas | None = None,
    ) -> None:
        self._catalogue = catalogue
        self._decodes = decodes
        self._theta = theta
        self._decoders = decoders
        self._evict = evict
        self._clock = clock
        self._quotas = quotas
        self._sweeper: asyncio.Task[None] | None = None
        self.build = ""
        """Of the decoder that was chosen last: of what there would be, were there one; "" for unknown."""

    def start(self) -> None:
        self._sweeper = asyncio.create_task(self._sweep_again())

    async def close(self) -> None:
        await tasks.end([self._sweeper])

    async def put(self, tenant: str, entry: ImageEntry, expected: ExpectedImage, ttl_ms: int = 0) -> bool:
        """Catalogue an image, for a time (0: for ever); return whether it replaced one.

        The record of that one is deleted unless others use it.

        Raises `ConditionFailed`, `QuotaExceeded`.
        """
        now_ms = self._clock.now_ms()
        expires_ms = now_ms + ttl_ms if ttl_ms else 0
        entry = replace(entry, created_ms=now_ms, expires_ms=expires_ms)
        async with contextlib.AsyncExitStack() as room:
            if self._quotas is not None:
                try:
                    await room.enter_async_context(self._quotas.reserve(tenant, ENTRY_BYTES + entry.record_bytes))
                except QuotaExceeded:
                    await self._catalogue.refused(entry.record_name)
                    raise
            replaced = await self._catalogue.put(tenant, entry, expected)
        if replaced is not None:
            await self._release(replaced)
        return replaced is not None

    async def head(self, tenant: str, image_id: str) -> ImageEntry:
        """Return an image's entry. Raises `ImageMissing`."""
        check_image_id(image_id)
        with tracer().start_as_current_span(names.CATALOGUE_READ, kind=SpanKind.CLIENT):
            entry = await self._catalogue.get(tenant, image_id)
        if entry is None or entry.is_over(self._clock.now_ms()):
            raise ImageMissing(f"there is no image {image_id!r}", field="id")
        return entry

    async def delete(self, tenant: str, image_id: str) -> bool:
        check_image_id(image_id)
        entry = await self._catalogue.delete(tenant, image_id)
        if entry is not None:
            await self._release(entry)
        return entry is not None

    async def list(self, tenant: str, prefix: str, after: str, limit: int) -> tuple[list[ImageEntry], str]:
        """A page, and after which id the next begins ("": there is none)."""
        if limit > LIST_MAX:
            raise InvalidRequest(f"{limit}, {LIST_MAX} at most", field="limit")
        entries, next_after = await self._catalogue.list(tenant, prefix, after, limit or LIST_MAX)
        now_ms = self._clock.now_ms()
        return [entry for entry in entries if not entry.is_over(now_ms)], next_after

    async def route(self, entry: ImageEntry, failed: Iterable[str] = ()) -> Route | None:
        """Choose a decoder; None if there is none. `failed`: decoders that have just not answered the one that asks.

        Raises `MetadataUnavailable`.
        """
        await self._decodes.failed(failed)
        nodes = rendezvous(entry.record_name, self._decoders())
        if not nodes:
            return None
        choice = await self._decodes.route(entry.record_name, [candidate(node) for node in nodes], self._theta)
        runner = nodes[choice.runner]
        self.build = build_of(runner)
        return Route(choice.ticket, runner, nodes[choice.owner], choice.is_joined)

    async def finish(self, ticket: int, *, failed: bool) -> None:
        """End a route. `failed`: its decoder did not answer, and is passed over for a while."""
        await self._decodes.finish(ticket, failed=failed)

    async def _release(self, entry: ImageEntry) -> None:
        if await self._catalogue.release(entry.record_name):
            await self._remove(entry.record_name)

    async def _remove(self, record_name: bytes) -> None:
        """Delete a record; one that is being read at this moment stays among the unused, for later."""
        if await self._evict(record_keys(record_name)):
            await self._catalogue.removed(record_name)

    async def sweep(self) -> None:
        """Remove expired images, and records that became unused after their last image was deleted."""
        for tenant, image_id in await self._catalogue.expired(self._clock.now_ms(), _SWEEP_MAX):
            entry = await self._catalogue.get(tenant, image_id)
            if entry is not None and entry.is_over(self._clock.now_ms()):
                deleted = await self._catalogue.delete(tenant, image_id, entry)
                if deleted is not None:  # it is as it was read: not deleted or replaced meanwhile
                    await self._release(deleted)
        for record in await self._catalogue.unused(_SWEEP_MAX):
            await self._remove(record)

    async def _sweep_again(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                await self.sweep()
            except QuireError as error:
                logger().warning("unused records could not be removed", error=str(error))
