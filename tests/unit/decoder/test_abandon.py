"""A decode that is wanted no more ends, also where that is said before it comes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.model.descriptor import RdmaTarget
from quire.model.errors import Abandoned
from quire.model.images import ImageEntry, Rendering
from quire.wire import convert, convert_images
from quire.wire.v1 import decoder_pb2 as pb
from quire_decoder.server import DecoderServicer


class _Decoder:
    """Makes nothing until it is told to end."""

    asked = 0

    async def serve(self, *request: object) -> None:
        self.asked += 1
        await asyncio.Event().wait()


def _request(request_id: bytes) -> pb.DecodeRequest:
    return pb.DecodeRequest(
        entry=convert_images.image_to(ImageEntry("cat", bytes(32), 9, bytes(32), "", 64, 64)),
        rendering=convert_images.rendering_to(Rendering()),
        target=convert.target_to(RdmaTarget(b"w", 4096, 1 << 20, b"k")),
        request_id=request_id,
    )


async def test_it_ends_when_it_is_wanted_no_more() -> None:
    nothing: Any = None
    decoder: Any = _Decoder()
    servicer = DecoderServicer(decoder, nothing)
    running = asyncio.create_task(servicer.Decode(_request(b"one"), nothing))
    other = asyncio.create_task(servicer.Decode(_request(b"two"), nothing))
    await asyncio.sleep(0.01)
    await servicer.Abandon(pb.AbandonRequest(request_id=b"one"), nothing)
    async with asyncio.timeout(10):
        with pytest.raises(Abandoned):
            await running
    assert not other.done() and decoder.asked == 2
    other.cancel()
    with pytest.raises(asyncio.CancelledError):  # by its own caller: not a refusal
        await other
    await servicer.Abandon(pb.AbandonRequest(request_id=b"late"), nothing)
    with pytest.raises(Abandoned):
        await servicer.Decode(_request(b"late"), nothing)
    assert decoder.asked == 2
