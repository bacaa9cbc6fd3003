"""Images through the SDK: latents in, encoded images out; bytes by UCX between this process and the cluster."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

from quire.client.buffers import Buffer
from quire.client.client import QuireClient
from quire.durability import Durability
from quire.errors import ChunkMissing, InvalidRequest
from quire.images import RECORD_BYTES_MAX, ImageEntry, Rendering, check_image_id
from quire.latents import LatentInfo, Values, decode_record, encode_record, read_info
from quire.rpc import convert
from quire.telemetry import names, tracer
from quire.v1 import images_pb2 as pb

_LEASE_MS: Final = 30_000
_PAGE: Final = 500
_silent: Final[list[Buffer]] = []


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image. `data` is empty where the ETag that was given is still good.

    `source`: image, latent or miss, by the cache of the decoder `decoder`, or joined to another's request; times by
    stage in microseconds.
    """

    entry: ImageEntry
    data: bytes
    etag: str
    source: str
    decoder: str
    stages_us: dict[str, int]


class ImageClient:
    """What a `QuireClient` does with images."""

    def __init__(self, client: QuireClient) -> None:
        self._client = client

    async def put(
        self, image_id: str, values: Values, info: LatentInfo, *, durability: Durability = Durability.LOCAL
    ) -> ImageEntry:
        """Store a latent; an image of that id is replaced. Raises `RecordInvalid`, `InvalidRequest`."""
        record = await asyncio.to_thread(encode_record, values, info)
        return await self.put_record(image_id, record, durability=durability)

    async def put_record(
        self, image_id: str, record: bytes, *, durability: Durability = Durability.LOCAL
    ) -> ImageEntry:
        """Store a record as it is. Raises `RecordInvalid`, `CorruptData` for one that does not decode."""
        check_image_id(image_id)
        if len(record) > RECORD_BYTES_MAX:
            raise InvalidRequest(f"{len(record)} bytes, {RECORD_BYTES_MAX} at most", field="record")
        info = read_info(record)
        await asyncio.to_thread(decode_record, record)
        entry = ImageEntry(
            image_id,
            hashlib.sha256(record).digest(),
            len(record),
            info.sha256,
            info.vae.weights_sha256,
            info.height,
            info.width,
        )
        with tracer().start_as_current_span(names.CLIENT_IMAGE, attributes={"quire.image": image_id}):
            await self._store(entry, record, durability)
            await self._client.call("PutImage", pb.PutImageRequest(entry=convert.image_to(entry)))
        return entry

    async def get(self, image_id: str, rendering: Rendering | None = None, *, if_none_match: str = "") -> Image:
        """An image, decoded and encoded as asked. Raises `ImageMissing`, `NoDecoder`, `VaeUnknown`, …"""
        wanted = rendering or Rendering()
        entry = await self.head(image_id)
        buffer = self._client.allocate(wanted.bytes_max(entry))
        request = pb.GetImageRequest(
            image_id=image_id,
            rendering=convert.rendering_to(wanted),
            target=convert.target_to(buffer.target()),
            if_none_match=if_none_match,
        )
        quiet = False
        try:
            with tracer().start_as_current_span(names.CLIENT_IMAGE, attributes={"quire.image": image_id}):
                answer: Any = await self._client.call("GetImage", request)
            quiet = True
            assert buffer.view is not None, "host memory"
            data = buffer.view[: answer.length].tobytes()
        finally:
            # A decoder that did not answer in time may still write: then this memory is never given back.
            if quiet:
                buffer.close()
            else:
                _silent.append(buffer)
        found = convert.image_from(answer.entry)
        return Image(found, data, answer.etag, answer.source, answer.decoder, dict(answer.stages_us))

    async def get_record(self, image_id: str) -> bytes:
        """The latent record, as it was stored. Raises `ImageMissing`, `ChunkMissing`."""
        return await fetch_record(self._client, await self.head(image_id))

    async def get_latent(self, image_id: str) -> tuple[Values, LatentInfo]:
        """The latent, bit by bit as it was put."""
        return await asyncio.to_thread(decode_record, await self.get_record(image_id))

    async def head(self, image_id: str) -> ImageEntry:
        """Raises `ImageMissing`."""
        check_image_id(image_id)
        answer = await self._client.call("HeadImage", pb.HeadImageRequest(image_id=image_id))
        return convert.image_from(answer.entry)

    async def delete(self, image_id: str) -> bool:
        """Whether there was one."""
        check_image_id(image_id)
        answer = await self._client.call("DeleteImage", pb.DeleteImageRequest(image_id=image_id))
        return bool(answer.deleted)

    async def list(self, prefix: str = "") -> AsyncIterator[ImageEntry]:
        """All images whose ids begin with `prefix`, in order."""
        after = ""
        while True:
            request = pb.ListImagesRequest(prefix=prefix, after=after, limit=_PAGE)
            page = (await self._client.call("ListImages", request)).entries
            for entry in page:
                yield convert.image_from(entry)
            if len(page) < _PAGE:
                return
            after = page[-1].image_id

    async def _store(self, entry: ImageEntry, record: bytes, durability: Durability) -> None:
        buffer = self._client.allocate(entry.namespace.layout.chunk_bytes)
        assert buffer.view is not None, "host memory"
        memoryview(buffer.view.data)[: len(record)] = record
        session = await self._client.store(entry.namespace, entry.keys, 0, buffer, durability=durability)
        session.layer_produced(0)
        try:
            await session.finish()
        finally:
            await session.quiesced(10)
            buffer.close()


async def fetch_record(client: QuireClient, entry: ImageEntry) -> bytes:
    """A record out of the chunk store. Raises `ChunkMissing`, and what a delivery ends with."""
    found = await client.lookup(entry.namespace, entry.keys, lease_ttl_ms=_LEASE_MS)
    if not found.matched_chunks:
        raise ChunkMissing(f"the record of {entry.image_id!r} is not stored (any more)", field="id")
    buffer = client.allocate(entry.namespace.layout.chunk_bytes)
    delivery = await client.fetch(found, buffer)
    try:
        await delivery.layer(0)
        await delivery.summary()
        assert buffer.view is not None, "host memory"
        return buffer.view[: entry.record_bytes].tobytes()
    finally:
        await delivery.quiesced(10)
        buffer.close()
        await client.release(found)
