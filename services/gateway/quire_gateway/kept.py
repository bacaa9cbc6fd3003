"""Images that this gateway has just sent, for those who ask for the same."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from quire_gateway.images import ImageServed

_SHARE_MAX: Final = 16
"""One image takes a sixteenth of the memory at most."""


class KeptImages:
    """By ETag, the least recently sent leaves first. What is asked for is looked up in the catalogue all the same: an
    image that is deleted or replaced has no entry, or another ETag.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._kept: OrderedDict[str, tuple[ImageServed, bytes]] = OrderedDict()
        self._bytes = 0

    def get(self, etag: str) -> tuple[ImageServed, bytes] | None:
        """As it was sent."""
        if (kept := self._kept.get(etag)) is not None:
            self._kept.move_to_end(etag)
        return kept

    def keep(self, served: ImageServed, data: bytes) -> None:
        """It was sent."""
        if not data or len(data) * _SHARE_MAX > self._bytes_max or served.etag in self._kept:
            return
        self._kept[served.etag] = served, data
        self._bytes += len(data)
        while self._bytes > self._bytes_max:
            _, (_, gone) = self._kept.popitem(last=False)
            self._bytes -= len(gone)
