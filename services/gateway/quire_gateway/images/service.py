"""Images and latent records for clients without memory of their own, over HTTP and S3: this process's memory serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from quire.model.descriptor import RdmaTarget
from quire.model.durability import Durability
from quire.model.errors import (
    ChunkMissing,
    ConditionFailed,
    DeadlineExceeded,
    ImageMissing,
    InvalidRequest,
    TargetInvalid,
    Unavailable,
)
from quire.model.images import (
    NO_ATTRIBUTES,
    RECORD_BYTES_MAX,
    ExpectedImage,
    ImageAttributes,
    ImageEntry,
    Rendering,
    check_image_id,
    check_record,
    entry_of_record,
)
from quire_gateway.core.preconditions import ConditionOutcome, Preconditions
from quire_gateway.images.latents import LatentGateway
from quire_gateway.images.reads import ImageReads, ImageServed
from quire_gateway.images.served_cache import ServedImages
from quire_gateway.images.vaes import KnownVaes
from quire_gateway.ports import RemoteCatalogue

_PAGE: Final = 500
_DELETES: Final = 16
_ANYTHING: Final = ExpectedImage()
_UNCONDITIONAL: Final = Preconditions()


class PeerMemory(Protocol):
    """Registered memory that peers write to and read from; ranges that a silent one may still use are quarantined."""

    async def pull(self, target: RdmaTarget, length: int) -> bytes:
        """Read from a peer's memory. Raises `TargetInvalid`, `PeerLost`."""

    def lend(self, data: bytes) -> Any:
        """Memory with a copy of `data`: a context manager that yields its `RdmaTarget`."""

    def room(self, length: int) -> Any:
        """Memory for a peer to write: a context manager that yields (target, view)."""


class ImageService:
    """Every method is one request, for a tenant: images are its own.

    `reach`: makes sure that the data plane reaches the cluster first. `name`: returns the chunk store's name of a
    tenant's record. `kept_bytes`: of images that were just sent. `stored`: called with new records.
    """

    def __init__(
        self,
        *,
        images: ImageReads,
        latents: LatentGateway,
        catalogue: RemoteCatalogue,
        memory: PeerMemory,
        vaes: KnownVaes,
        reach: Callable[[], Awaitable[None]],
        name: Callable[[str, bytes], bytes] = lambda tenant, record_sha256: record_sha256,
        kept_bytes: int = 0,
        stored: Callable[[ImageEntry, bytes], None] = lambda entry, record: None,
    ) -> None:
        self._images = images
        self._latents = latents
        self._catalogue = catalogue
        self._memory = memory
        self._vaes = vaes
        self._reach = reach
        self._name = name
        self._kept = ServedImages(kept_bytes)
        self._stored = stored

    async def get(
        self,
        tenant: str,
        image_id: str,
        rendering: Rendering,
        conditions: Preconditions = _UNCONDITIONAL,
        *,
        version: str = "",
    ) -> tuple[ImageServed, bytes]:
        """An image, encoded as asked; no bytes where the client has it by its `conditions`.

        One that was just sent is sent again while the catalogue has it so; else a decoder that fails is passed over
        once. `version`: the only one that will do; "" for any.

        Raises `ImageMissing`, `ConditionFailed`, `NoDecoder`, and what the decoder raises.
        """
        check_image_id(image_id)
        await self._reach()
        try:
            return await self._get(tenant, image_id, rendering, conditions, version)
        except (Unavailable, DeadlineExceeded, ChunkMissing):  # or it was replaced, and its record went, meanwhile
            return await self._get(tenant, image_id, rendering, conditions, version)

    async def _get(
        self, tenant: str, image_id: str, rendering: Rendering, conditions: Preconditions, version: str
    ) -> tuple[ImageServed, bytes]:
        image = await self._images.describe(tenant, image_id, rendering)
        if version not in ("", image.entry.version):
            raise ImageMissing(f"{image_id!r} has no version {version[:80]!r}", field="v")
        outcome = conditions.of_read(image.etag, image.entry.created_ms / 1e3)
        if outcome is ConditionOutcome.FAILED:
            raise ConditionFailed("the image is another one now, or was modified", field="If-Match")
        if outcome is ConditionOutcome.NOT_MODIFIED:
            return ImageServed(image.entry, image.etag), b""
        if cached := self._kept.get(image.entry, image.etag):
            sent, data = cached
            return ImageServed(image.entry, image.etag, sent.length, "gateway"), data
        with self._memory.room(rendering.bytes_max(image.entry)) as (target, view):
            served = await self._images.render(tenant, image, target)
            data = bytes(view[: served.length])
        self._kept.keep(served, data)
        return served, data

    async def get_record(self, tenant: str, image_id: str) -> tuple[ImageEntry, bytes]:
        """Read an image's entry and its latent record. Raises `ImageMissing`, `ChunkMissing`, `CorruptData`."""
        await self._reach()
        try:
            return await self._get_record(await self.head(tenant, image_id))
        except (ChunkMissing, TargetInvalid):
            return await self._get_record(await self.head(tenant, image_id))  # it may have been replaced meanwhile

    async def _get_record(self, entry: ImageEntry) -> tuple[ImageEntry, bytes]:
        with self._memory.room(entry.namespace.layout.chunk_bytes) as (target, view):
            await self._latents.read(entry, target)
            record = bytes(view[: entry.record_bytes])
        await asyncio.to_thread(check_record, record, entry)
        return entry, record

    async def put_record(
        self,
        tenant: str,
        image_id: str,
        record: bytes,
        *,
        durability: Durability = Durability.LOCAL,
        expected: ExpectedImage = _ANYTHING,
        attributes: ImageAttributes = NO_ATTRIBUTES,
        allow_unknown_vae: bool = False,
    ) -> ImageEntry:
        """Store a record under an id.

        Raises `RecordInvalid`, also for one that no VAE of the cluster decodes, `InvalidRequest`, also for provenance
        that no decoder signs, `ConditionFailed`.
        """
        entry, values, info = await asyncio.to_thread(entry_of_record, image_id, record)
        metadata = tuple(sorted(attributes.metadata))
        name = self._name(tenant, entry.record_sha256)
        entry = replace(entry, metadata=metadata, provenance=attributes.provenance, record_name=name)
        if not allow_unknown_vae:
            await self._vaes.check(values, info)
        if entry.provenance:
            await self._vaes.check_signed()
        await self._reach()
        with self._memory.lend(record.ljust(entry.namespace.layout.chunk_bytes, b"\0")) as source:
            await self._latents.put(tenant, entry, source, durability, expected, attributes.ttl_ms)
        if not allow_unknown_vae:
            self._stored(entry, record)
        return entry

    async def take_record(
        self,
        tenant: str,
        image_id: str,
        source: RdmaTarget,
        length: int,
        *,
        durability: Durability,
        expected: ExpectedImage,
        attributes: ImageAttributes = NO_ATTRIBUTES,
        allow_unknown_vae: bool,
    ) -> ImageEntry:
        """Store the record in a client's memory: it is read, checked and stored here, so that its digest is right.

        Raises as `put_record`, `TargetInvalid`, `PeerLost`.
        """
        check_image_id(image_id)
        record = await self.pull(source, length, RECORD_BYTES_MAX, "record_bytes")
        return await self.put_record(
            tenant,
            image_id,
            record,
            durability=durability,
            expected=expected,
            attributes=attributes,
            allow_unknown_vae=allow_unknown_vae,
        )

    async def pull(self, source: RdmaTarget, length: int, length_max: int, field: str) -> bytes:
        """Read bytes out of a client's memory. Raises `InvalidRequest` for its length, `TargetInvalid`, `PeerLost`."""
        if not 0 < length <= length_max:
            raise InvalidRequest(f"{length} bytes, 1 to {length_max}", field=field)
        await self._reach()
        return await self._memory.pull(source, length)

    async def head(self, tenant: str, image_id: str) -> ImageEntry:
        """Return an image's entry. Raises `ImageMissing`."""
        check_image_id(image_id)
        return await self._catalogue.head(tenant, image_id)

    async def delete(self, tenant: str, image_id: str) -> bool:
        """Whether there was one."""
        check_image_id(image_id)
        return await self._catalogue.delete(tenant, image_id)

    async def delete_all(self, tenant: str, image_ids: Sequence[str]) -> list[bool]:
        """Delete several; returns for each whether it existed. Raises `InvalidRequest` before any is deleted."""
        for image_id in image_ids:
            check_image_id(image_id)
        turns = asyncio.Semaphore(_DELETES)

        async def delete(image_id: str) -> bool:
            async with turns:
                return await self._catalogue.delete(tenant, image_id)

        return await asyncio.gather(*(delete(name) for name in image_ids))

    async def page(self, tenant: str, prefix: str, after: str, limit: int) -> tuple[Sequence[ImageEntry], str]:
        """Return images whose ids begin with `prefix` and come after `after`, in order; and the next `after`.

        The latter is "" at the end.
        """
        return await self._catalogue.list(tenant, prefix, after, limit)

    async def list(self, tenant: str, prefix: str = "", after: str = "") -> AsyncIterator[ImageEntry]:
        """Yield the images whose ids begin with `prefix` and come after `after`, in order."""
        while True:
            page, after = await self._catalogue.list(tenant, prefix, after, _PAGE)
            for entry in page:
                yield entry
            if not after:
                return
