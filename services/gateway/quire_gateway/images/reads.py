"""Reads of images: from the client's cache, the owner's cache, or a decoder; and its failures."""

from __future__ import annotations

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
    Unavailable,
)
from quire.model.images import ImageEntry, Rendering, check_image_id
from quire.telemetry import logger, names, tracer
from quire_gateway.images.owners import ImageOwners
from quire_gateway.ports import Clock, Decoders, Entries, ImageRoute, Router


@dataclass(frozen=True, slots=True)
class DescribedImage:
    """An image as it would be rendered: `etag` is of its latent, the rendering and its owner's build."""

    entry: ImageEntry
    rendering: Rendering
    etag: str


@dataclass(frozen=True, slots=True)
class ImageServed:
    """Result for a client. `length` 0: its version is still good."""

    entry: ImageEntry
    etag: str
    length: int = 0
    source: str = ""
    decoder: str = ""
    stages_us: dict[str, int] = field(default_factory=dict)


_LEASE_MS: Final = 60_000


class ImageReads:
    """Reads in two steps: `describe` an image, and `render` it for a client that does not have it.

    Images are a tenant's own. `enlarge`: whether they may be asked for larger than they are.
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

    async def describe(self, tenant: str, image_id: str, rendering: Rendering) -> DescribedImage:
        """Return an image's entry and ETag. Raises `InvalidRequest`, `ImageMissing`, `NoDecoder`."""
        if rendering.enlarge and not self._enlarge:
            raise InvalidRequest("not allowed here (QUIRE_GATEWAY_IMAGES_ENLARGE)", field="enlarge")
        entry = await self._entry(tenant, image_id)
        build = self._owners.build(entry.record_name) or await self._build_of_route(entry)
        return DescribedImage(entry, rendering, rendering.etag(entry, build))

    async def render(self, tenant: str, image: DescribedImage, target: RdmaTarget) -> ImageServed:
        """Have an image written into a client's memory.

        A decoder of another build than the owner's gives another ETag.

        Raises `NoDecoder`, `Unavailable` if the image was replaced since, and what the decoder raises. An attempt
        that fails is not repeated here: it may still write into that memory, so another needs other memory.
        """
        with tracer().start_as_current_span(names.GATEWAY_IMAGE, attributes={"quire.image": image.entry.image_id}):
            return await self._cached(tenant, image, target) or await self._decoded(tenant, image, target)

    async def _entry(self, tenant: str, image_id: str) -> ImageEntry:
        check_image_id(image_id)
        with tracer().start_as_current_span(names.CATALOGUE_READ, kind=SpanKind.CLIENT):
            entry = await self._entries.get(tenant, image_id)
        if entry is None or entry.is_over(self._clock.now_ms()):
            raise ImageMissing(f"there is no image {image_id!r}", field="id")
        return entry

    async def _build_of_route(self, entry: ImageEntry) -> str:
        """Return the build of the decoder that would make the image. Raises `NoDecoder` where none is known."""
        route = await self._router.route(entry, 0, self._owners.failing)
        if route.runner:
            await self._give_back(route, failed=False)
        if not route.build:
            raise NoDecoder("no decoder is alive", retry_after_s=1.0)
        return route.build

    async def _cached(self, tenant: str, image: DescribedImage, target: RdmaTarget) -> ImageServed | None:
        """Serve from the owner's cache, if that needs no decoding."""
        entry = image.entry
        owner = self._owners.owner(entry.record_name)
        if owner is None:
            return None
        try:
            done = await self._decoders.cached(tenant, owner.grpc_address, entry, image.rendering, target)
        except (NodeUnavailable, DeadlineExceeded) as error:
            if not error.answered:
                self._owners.failed(owner)
            raise
        if not done.length:
            return None
        etag = image.rendering.etag(entry, done.build)
        return ImageServed(entry, etag, done.length, done.source, owner.node_id, done.stages_us)

    async def _decoded(self, tenant: str, image: DescribedImage, target: RdmaTarget) -> ImageServed:
        """Decoded where the orchestrator says; the decoder gets the record's lease along."""
        route = await self._router.route(image.entry, _LEASE_MS, self._owners.failing)
        if not route.runner:
            raise NoDecoder("no decoder is alive", retry_after_s=1.0)
        failed = False
        try:
            if route.entry.version != image.entry.version:
                raise Unavailable(f"image {image.entry.image_id!r} was replaced; retry")
            done = await self._decoders.decode(tenant, route, image.rendering, target)
            etag = image.rendering.etag(route.entry, done.build)
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
