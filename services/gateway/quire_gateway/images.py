"""Images through the frontend: which decoder, whether it failed, and whether the client has the image already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from quire.model.descriptor import RdmaTarget
from quire.model.errors import DeadlineExceeded, InvalidRequest, NoDecoder, NodeUnavailable, QuireError
from quire.model.images import ImageEntry, Rendering
from quire.telemetry import logger, names, tracer
from quire_gateway.ports import Decoders, ImageRoute, Router


@dataclass(frozen=True, slots=True)
class ImageServed:
    """What a client gets. `length` 0: what it has is still good."""

    entry: ImageEntry
    etag: str
    length: int = 0
    source: str = ""
    decoder: str = ""
    stages_us: dict[str, int] = field(default_factory=dict)


def has_nothing(entry: ImageEntry, etag: str) -> bool:
    """Of a client that wants the image whatever it is."""
    return False


_LEASE_MS: Final = 60_000
Memory = RdmaTarget | Callable[[ImageEntry], RdmaTarget]
"""Where an image goes, or what says so once it is known how large it may be."""
Has = Callable[[ImageEntry, str], bool]
"""Whether the client has what that ETag is of. May raise, where it does not want it then."""


class ImageGateway:
    """Every method is one request, for a tenant: images are its own.

    `enlarge`: whether they may be asked for larger than they are.
    """

    def __init__(self, router: Router, decoders: Decoders, *, enlarge: bool = False) -> None:
        self._router = router
        self._decoders = decoders
        self._enlarge = enlarge

    async def get(
        self, tenant: str, image_id: str, rendering: Rendering, memory: Memory | None, has: Has
    ) -> ImageServed:
        """Have it written into `memory`. Raises `ImageMissing`, `NoDecoder`, what `has` raises and what the decoder
        raises.

        One look at the catalogue: the decoder gets the record's lease along. One that fails is not replaced here: it
        may still write into that memory, so another try needs other memory.
        """
        if rendering.enlarge and not self._enlarge:
            raise InvalidRequest("not allowed here (QUIRE_GATEWAY_IMAGES_ENLARGE)", field="enlarge")
        with tracer().start_as_current_span(names.GATEWAY_IMAGE, attributes={"quire.image": image_id}):
            route = await self._router.route(tenant, image_id, _LEASE_MS if memory is not None else 0)
            if not route.runner:
                return _without_decoder(route, rendering, has)
            failed = False
            try:
                etag = rendering.etag(route.entry, route.build)
                if has(route.entry, etag) or memory is None:
                    return ImageServed(route.entry, etag)
                target = memory if isinstance(memory, RdmaTarget) else memory(route.entry)
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
    """What a client has may be good all the same. Raises `NoDecoder`."""
    etag = rendering.etag(route.entry, route.build)
    if route.build and has(route.entry, etag):
        return ImageServed(route.entry, etag)
    raise NoDecoder("no decoder is alive", retry_after_s=1.0)
