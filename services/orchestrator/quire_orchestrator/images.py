"""The desk for images: the catalogue, and which decoder makes what."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from quire.errors import ImageMissing, InvalidRequest, NoDecoder
from quire.images import ImageEntry, check_image_id
from quire.keys import ChunkKeys
from quire.nodes import Node
from quire_orchestrator.core.routing import ImageRouter, Route
from quire_orchestrator.ports import Catalogue, Clock

LIST_MAX = 1000


class ImageDesk:
    """Every method is one request. `evict`: drops chunks from the end of a chain, keeping so many."""

    def __init__(
        self,
        catalogue: Catalogue,
        router: ImageRouter,
        decoders: Callable[[], list[Node]],
        evict: Callable[[ChunkKeys, int], Awaitable[int]],
        clock: Clock,
    ) -> None:
        self._catalogue = catalogue
        self._router = router
        self._decoders = decoders
        self._evict = evict
        self._clock = clock

    async def put(self, entry: ImageEntry) -> bool:
        """Catalogue an image; whether it replaced one, whose record goes unless others use it."""
        before = await self._catalogue.put(replace(entry, created_ms=self._clock.now_ms()))
        if before is not None:
            await self._release(before)
        return before is not None

    async def head(self, image_id: str) -> ImageEntry:
        """Raises `ImageMissing`."""
        check_image_id(image_id)
        entry = await self._catalogue.get(image_id)
        if entry is None:
            raise ImageMissing(f"there is no image {image_id!r}", field="id")
        return entry

    async def delete(self, image_id: str) -> bool:
        check_image_id(image_id)
        entry = await self._catalogue.delete(image_id)
        if entry is not None:
            await self._release(entry)
        return entry is not None

    async def list(self, prefix: str, after: str, limit: int) -> list[ImageEntry]:
        if limit > LIST_MAX:
            raise InvalidRequest(f"{limit}, {LIST_MAX} at most", field="limit")
        return await self._catalogue.list(prefix, after, limit or LIST_MAX)

    async def route(self, image_id: str) -> tuple[Route, ImageEntry]:
        """Raises `ImageMissing`, `NoDecoder`."""
        entry = await self.head(image_id)
        route = self._router.route(image_id, self._decoders(), self._clock.monotonic_s())
        if route is None:
            raise NoDecoder("no decoder is alive")
        return route, entry

    def finish(self, ticket: int, *, failed: bool) -> None:
        self._router.finish(ticket, failed_at_s=self._clock.monotonic_s() if failed else None)

    async def _release(self, entry: ImageEntry) -> None:
        if await self._catalogue.release(entry.record_sha256):
            await self._evict(entry.keys, 0)
