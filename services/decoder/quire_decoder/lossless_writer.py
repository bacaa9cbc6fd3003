"""Lossless images for the cache. They are encoded after the answer, unless the answer is the lossless image."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from quire.model.images import ImageEntry
from quire.telemetry import background, logger
from quire_decoder.device import Picture
from quire_decoder.pipeline import LOSSLESS, Pipeline

_LATER_S: Final = 0.05
"""An image to keep is encoded this long after its decode, or as soon as a request waits for it: answers go first."""


@dataclass(slots=True, eq=False)
class _Making:
    picture: Picture
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[bytes | None] | None = None


class LosslessWriter:
    """Images that are being encoded for a cache; their pixels answer requests in the meantime.

    `keep`: puts an image of a build into the cache of the decoder at an address.
    """

    def __init__(self, pipeline: Pipeline, keep: Callable[[ImageEntry, bytes, str, str], Awaitable[None]]) -> None:
        self._pipeline = pipeline
        self._keep = keep
        self._making: dict[bytes, _Making] = {}

    def begin(self, entry: ImageEntry, picture: Picture, owner_address: str, tenant: str) -> None:
        """Encode an image that a cache wants. One that fails, or that the encoders have no time for, is not kept."""
        key = entry.record_name
        if key in self._making:
            return
        making = self._making[key] = _Making(picture)
        making.task = asyncio.create_task(self._make(making, entry, owner_address, tenant), context=background())
        making.task.add_done_callback(partial(self._ended, key))

    def picture(self, entry: ImageEntry) -> Picture | None:
        """Return the pixels of an image that is being made."""
        making = self._making.get(entry.record_name)
        return making.picture if making is not None else None

    async def image(self, entry: ImageEntry) -> bytes | None:
        """The image, if it is being encoded: without further delay. None if it is not, or if encoding fails."""
        making = self._making.get(entry.record_name)
        if making is None or making.task is None:
            return None
        making.wanted.set()
        await asyncio.wait([making.task])
        done = making.task
        return None if done.cancelled() or done.exception() is not None else done.result()

    def close(self) -> None:
        for making in self._making.values():
            if making.task is not None:
                making.task.cancel()

    async def _make(self, making: _Making, entry: ImageEntry, owner_address: str, tenant: str) -> bytes | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LATER_S):
                await making.wanted.wait()
        if self._pipeline.encoding and not making.wanted.is_set():
            return None
        image = await self._pipeline.encode(
            making.picture.pixels, LOSSLESS, {}, entry=entry, tenant=tenant, stage="keep"
        )
        await self._keep(entry, image, making.picture.build, owner_address)
        return image

    def _ended(self, key: bytes, task: asyncio.Task[bytes | None]) -> None:
        self._making.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger().warning("an image is not kept", error=str(error))
