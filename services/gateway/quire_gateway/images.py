"""Images through the door: which decoder, once more elsewhere if it fails, and whether the client has it already."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.descriptor import RdmaTarget
from quire.errors import DeadlineExceeded, QuireError, Unavailable
from quire.images import ImageEntry, Rendering
from quire.telemetry import logger, names, tracer
from quire_gateway.ports import Decoders, Router


@dataclass(frozen=True, slots=True)
class ImageServed:
    """What a client gets. `length` 0: what it has is still good."""

    entry: ImageEntry
    etag: str
    length: int = 0
    source: str = ""
    decoder: str = ""
    stages_us: dict[str, int] = field(default_factory=dict)


class ImageGateway:
    """Every method is one request."""

    def __init__(self, router: Router, decoders: Decoders) -> None:
        self._router = router
        self._decoders = decoders

    async def get(self, image_id: str, rendering: Rendering, target: RdmaTarget, if_none_match: str) -> ImageServed:
        """Have it written into `target`. Raises `ImageMissing`, `NoDecoder`, and what the decoder raises."""
        avoid: list[str] = []
        with tracer().start_as_current_span(names.GATEWAY_IMAGE, attributes={"quire.image": image_id}):
            while True:
                route = await self._router.route(image_id, avoid)
                try:
                    etag = rendering.etag(route.entry, route.build)
                    if if_none_match and if_none_match == etag:
                        return ImageServed(route.entry, etag)
                    owner = route.owner_address if route.owner != route.runner else ""
                    done = await self._decoders.decode(route.runner_address, route.entry, rendering, target, owner)
                    etag = rendering.etag(route.entry, done.build)
                    return ImageServed(route.entry, etag, done.length, done.source, route.runner, done.stages_us)
                except (Unavailable, DeadlineExceeded) as error:
                    if avoid:
                        raise
                    avoid.append(route.runner)
                    logger().warning("a decoder failed, another is asked", decoder=route.runner, error=str(error))
                finally:
                    await self._give_back(route.ticket)

    async def _give_back(self, ticket: int) -> None:
        try:
            await self._router.finish(ticket)
        except QuireError as error:
            logger().warning("a decode counts as running until it runs out", error=str(error))
