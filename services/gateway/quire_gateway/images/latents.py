"""Latent records through the frontend: one request stores and catalogues, one brings a record back."""

from __future__ import annotations

import os
from typing import Final

from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.durability import Durability, OnExisting
from quire.model.errors import ChunkMissing, TargetInvalid
from quire.model.images import ExpectedImage, ImageEntry
from quire.telemetry import names, tracer
from quire_gateway.kv.leases import Leases
from quire_gateway.kv.single_chunk import SingleChunkReads
from quire_gateway.kv.transfers import KvTransfers, StoreCall
from quire_gateway.ports import RemoteCatalogue

_PUT_TRIES: Final = 3
_ANYTHING: Final = ExpectedImage()


class LatentGateway:
    """Every method is one request, for a tenant: images are its own.

    A client leaves the memory unchanged if the error leaves open who uses it: `Unavailable`, `DeadlineExceeded`,
    `InternalError`.
    """

    def __init__(
        self, gateway: KvTransfers, catalogue: RemoteCatalogue, singles: SingleChunkReads, leases: Leases
    ) -> None:
        self._gateway = gateway
        self._singles = singles
        self._leases = leases
        self._catalogue = catalogue

    async def put(
        self,
        tenant: str,
        entry: ImageEntry,
        source: RdmaTarget,
        durability: Durability,
        expected: ExpectedImage = _ANYTHING,
        ttl_ms: int = 0,
    ) -> bool:
        """Store the record in `source`; returns whether the id had another image.

        Raises `TargetInvalid`, `ConditionFailed`, …
        """
        with tracer().start_as_current_span(names.GATEWAY_LATENT, attributes={"quire.image": entry.image_id}):
            for _ in range(_PUT_TRIES):
                await self._store(entry, source, durability, tenant)
                # Pinned until it is catalogued: the last image with that record may just be deleted.
                async with self._leases.held(entry.namespace, entry.keys) as leased:
                    if leased.matched_chunks:
                        return await self._catalogue.put(tenant, entry, expected, ttl_ms)
            raise ChunkMissing(f"the record of {entry.image_id!r} was evicted again and again", field="id")

    async def get(self, tenant: str, image_id: str, target: RdmaTarget) -> ImageEntry:
        """Have the record written to the beginning of `target`. Raises `ImageMissing`, `ChunkMissing`."""
        with tracer().start_as_current_span(names.GATEWAY_LATENT, attributes={"quire.image": image_id}):
            entry = await self._catalogue.head(tenant, image_id)
            await self.read(entry, target)
            return entry

    async def read(self, entry: ImageEntry, target: RdmaTarget) -> None:
        """Have that very record written to the beginning of `target`. Raises `ChunkMissing`, `TargetInvalid`."""
        layout = entry.namespace.layout
        if target.length < layout.chunk_bytes:
            raise TargetInvalid(f"{target.length} bytes, {layout.chunk_bytes} are needed", field="target")
        shape = (layout.num_layers, layout.chunk_tokens, layout.slice_bytes)
        descriptor = Descriptor(entry.keys, *shape, DeliveryOrder.AUTO, target)
        await self._singles.read(entry.namespace, descriptor, os.urandom(16), f"the record of {entry.image_id!r}")

    async def _store(self, entry: ImageEntry, source: RdmaTarget, durability: Durability, tenant: str) -> None:
        store = StoreCall(
            namespace=entry.namespace,
            keys=entry.keys,
            first=0,
            store_id=os.urandom(16),
            source=source,
            durability=durability,
            on_existing=OnExisting.SKIP,
            source_complete=True,
            tenant=tenant,
        )
        await self._gateway.store_whole(store)
