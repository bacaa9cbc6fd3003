"""Reads of images: from the client's cache, the owner's cache, or a decoder; and its failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.trace import SpanKind

from quire.model.descriptor import RdmaTarget
from quire.model.errors import (
    DeadlineExceeded,
    ImageMissing,
    InvalidRequest,
    NoDecoder,
    NodeUnavailable,
    QuireError,
)
from quire.model.images import ImageEntry, Rendering, check_image_id
from quire.telemetry import logger, names, tracer
from quire_gateway.images.owners import ImageOwners
from quire_gateway.ports import Clock, Decoders, Entries, ImageRoute, Router


@dataclass(frozen=True, slots=True)
class ImageServed:
    """Result for a client. `length` 0: its version is still good."""

    entry: ImageEntry
    etag: str
    length: int = 0
    source: str = ""
    decoder: str = ""
    stages_us: dict[str, int] = field(default_factory=dict)


def has_nothing(entry: ImageEntry, etag: str) -> bool:
    """Conditions of a client that wants the image in any version."""
    return False


_LEASE_MS: Final = 60_000
Memory = RdmaTarget | Callable[[ImageEntry], RdmaTarget]
"""Where an image goes, or what says so once it is known how large it may be."""
Has = Callable[[ImageEntry, str], bool]
"""Whether the client has what that ETag is of. May raise, where it does not want it then."""


class ImageReads:
    """Every method is one request, for a tenant: images are its own.

    `enlarge`: whether they may be asked for larger than they are.
    """

    def __init__(
        self,
        *,
        entries: Entries,
        owners: ImageOwners,
        router: Router,
        decoders: Decoders,
        clock: Clock,
        enlarge: bool = False,
    ) -> None:
        self._entries = entries
        self._owners = owners
        self._router = router
        self._decoders = decoders
        self._clock = clock
        self._enlarge = enlarge

    async def get(
        self, tenant: str, image_id: str, rendering: Rendering, memory: Memory | None, has: Has
    ) -> ImageServed:
        """Have it written into `memory`.

        Raises `ImageMissing`, `NoDecoder`, what `has` raises and what the decoder raises.

        One that fails is not replaced here: it may still write into that memory, so another try needs other memory.
        """
        if rendering.enlarge and not self._enlarge:
            raise InvalidRequest("not allowed here (QUIRE_GATEWAY_IMAGES_ENLARGE)", field="enlarge")
        with tracer().start_as_current_span(names.GATEWAY_IMAGE, attributes={"quire.image": image_id}):
            entry = await self._entry(tenant, image_id)
            if build := self._owners.build:
                etag = rendering.etag(entry, build)
                if memory is None or has(entry, etag):
                    return ImageServed(entry, etag)
            target = memory(entry) if callable(memory) else memory
            if target is not None:
                cached = await self._cached(tenant, entry, rendering, target)
                if cached is not None:  # without a common build the ETag is known only now
                    return cached if build or not has(entry, cached.etag) else ImageServed(entry, cached.etag)
            return await self._made(tenant, entry, rendering, target, has)

    async def _entry(self, tenant: str, image_id: str) -> ImageEntry:
        check_image_id(image_id)
        with tracer().start_as_current_span(names.CATALOGUE_READ, kind=SpanKind.CLIENT):
            entry = await self._entries.get(tenant, image_id)
        if entry is None or entry.is_over(self._clock.now_ms()):
            raise ImageMissing(f"there is no image {image_id!r}", field="id")
        return entry

    async def _cached(
        self, tenant: str, entry: ImageEntry, rendering: Rendering, target: RdmaTarget
    ) -> ImageServed | None:
        """Serve from the owner's cache, if that needs no decoding."""
        owner = self._owners.owner(entry.record_name)
        if owner is None:
            return None
        try:
            done = await self._decoders.cached(tenant, owner.grpc_address, entry, rendering, target)
        except (NodeUnavailable, DeadlineExceeded) as error:
            if not error.answered:
                self._owners.failed(owner)
            raise
        if not done.length:
            return None
        etag = rendering.etag(entry, done.build)
        return ImageServed(entry, etag, done.length, done.source, owner.node_id, done.stages_us)

    async def _made(
        self, tenant: str, entry: ImageEntry, rendering: Rendering, target: RdmaTarget | None, has: Has
    ) -> ImageServed:
        """Decoded where the orchestrator says; the decoder gets the record's lease along."""
        lease_ms = _LEASE_MS if target is not None else 0
        route = await self._router.route(entry, lease_ms, self._owners.failing)
        if not route.runner:
            return _without_decoder(route, rendering, has)
        failed = False
        try:
            etag = rendering.etag(route.entry, route.build)
            if has(route.entry, etag) or target is None:
                return ImageServed(route.entry, etag)
            done = await self._decoders.decode(tenant, route, rendering, target)
            etag = rendering.etag(route.entry, done.build)
            return ImageServed(route.entry, etag, done.length, done.source, route.runner, done.stages_us)
        except (NodeUnavailable, DeadlineExceeded) as error:
            failed = not error.answered  # the decoder itself; not what it needed, nor the client it could not reach
            logger().warning("an image was not made", decoder=route.runner, error=str(error), failed=failed)
            raise
        finally:
            await self._give_back(route, failed=failed)

    async def _give_back(self, route: ImageRoute, *, failed: bool) -> None:
        try:
            await self._router.finish(route, failed=failed)
        except QuireError as error:
            logger().warning("a decode counts as running until it runs out", error=str(error))


def _without_decoder(route: ImageRoute, rendering: Rendering, has: Has) -> ImageServed:
    """Return the client's own version if it is still good. Raises `NoDecoder` otherwise."""
    etag = rendering.etag(route.entry, route.build)
    if route.build and has(route.entry, etag):
        return ImageServed(route.entry, etag)
    raise NoDecoder("no decoder is alive", retry_after_s=1.0)
