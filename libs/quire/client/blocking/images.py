"""Images of the blocking client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from quire.client.blocking.image_calls import ImageCalls
from quire.model.images import ImageEntry


class Images(ImageCalls):
    """Images by `Client.images`. Methods as in `ImageClient`, blocking; safe from any thread."""

    def list(self, prefix: str = "", after: str = "") -> Iterator[ImageEntry]:
        """Yield the images whose ids begin with `prefix` and come after `after`, in order."""
        entries: AsyncIterator[ImageEntry] = self._images.list(prefix, after)

        async def following() -> ImageEntry | None:
            async for entry in entries:
                return entry
            return None

        while (entry := self._loop.run(following())) is not None:
            yield entry
