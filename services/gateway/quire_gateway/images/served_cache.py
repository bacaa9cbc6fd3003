"""Images that this gateway has just sent, for those who ask for the same."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from quire.model.images import ImageEntry
from quire_gateway.images.reads import ImageServed

_SHARE_MAX: Final = 16
"""One image takes a sixteenth of the memory at most."""


class ServedImages:
    """Keeps images by record and ETag; the least recently sent one leaves first.

    The catalogue is read for each request all the same: an image that is deleted or replaced has no entry, or another
    ETag.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._kept: OrderedDict[tuple[bytes, str], tuple[ImageServed, bytes]] = OrderedDict()
        self._bytes = 0

    def get(self, entry: ImageEntry, etag: str) -> tuple[ImageServed, bytes] | None:
        """Return the bytes that were sent."""
        key = entry.record_name, etag
        if (image := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
        return image

    def keep(self, served: ImageServed, data: bytes) -> None:
        """Keep an image that was sent."""
        key = served.entry.record_name, served.etag
        if not data or len(data) * _SHARE_MAX > self._bytes_max or key in self._kept:
            return
        self._kept[key] = served, data
        self._bytes += len(data)
        while self._bytes > self._bytes_max:
            _, (_, evicted) = self._kept.popitem(last=False)
            self._bytes -= len(evicted)
