"""Latent records through the door: one request stores and catalogues, one brings a record back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from typing import Final

from quire.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.durability import Durability, OnExisting
from quire.errors import ChunkMissing, InternalError, TargetInvalid, Unavailable, by_code
from quire.images import ImageEntry
from quire.outcome import NodeOutcome
from quire.telemetry import names, tracer
from quire_gateway.ports import Catalogue, Leased
from quire_gateway.runtime import FetchCall, Gateway, StoreCall

_LEASE_MS: Final = 30_000
_PUT_TRIES: Final = 3


class LatentGateway:
    """Every method is one request. Whoever asks keeps the memory as it is where the answer leaves open who uses it:
    `Unavailable`, `DeadlineExceeded`, `InternalError`."""

    def __init__(self, gateway: Gateway, catalogue: Catalogue) -> None:
        self._gateway = gateway
        self._catalogue = catalogue

    async def put(self, entry: ImageEntry, source: RdmaTarget, durability: Durability) -> bool:
        """Store the record that lies in `source`; whether the id had another image. Raises `TargetInvalid`, …"""
        with tracer().start_as_current_span(names.GATEWAY_LATENT, attributes={"quire.image": entry.image_id}):
            for _ in range(_PUT_TRIES):
                await self._store(entry, source, durability)
                # Pinned until it is catalogued: somebody may be deleting the last image that had the same record.
                async with self._leased(entry) as leased:
                    if leased.matched_chunks:
                        return await self._catalogue.put(entry)
            raise ChunkMissing(f"the record of {entry.image_id!r} was evicted again and again", field="id")

    async def get(self, image_id: str, target: RdmaTarget) -> ImageEntry:
        """Have the record written to the beginning of `target`. Raises `ImageMissing`, `ChunkMissing`, …"""
        with tracer().start_as_current_span(names.GATEWAY_LATENT, attributes={"quire.image": image_id}):
            entry = await self._catalogue.head(image_id)
            layout = entry.namespace.layout
            if target.length < layout.chunk_bytes:
                raise TargetInvalid(f"{target.length} bytes, {layout.chunk_bytes} are needed", field="target")
            async with self._leased(entry) as leased:
                if not leased.matched_chunks:
                    raise ChunkMissing(f"the record of {image_id!r} is not stored (any more)", field="id")
                descriptor = Descriptor(
                    entry.keys,
                    layout.num_layers,
                    layout.chunk_tokens,
                    layout.slice_bytes,
                    DeliveryOrder.AUTO,
                    target,
                )
                fetch = FetchCall(leased.lease, os.urandom(16), descriptor, leased.segments)
                async with contextlib.aclosing(self._gateway.fetch(fetch)) as events:  # type: ignore[type-var]
                    await _ended_well(events)
            return entry

    async def _store(self, entry: ImageEntry, source: RdmaTarget, durability: Durability) -> None:
        store = StoreCall(
            entry.namespace,
            entry.keys,
            0,
            os.urandom(16),
            source,
            durability,
            OnExisting.SKIP,
            source_complete=True,
        )
        async with contextlib.aclosing(self._gateway.store(store)) as events:  # type: ignore[type-var]
            await _ended_well(events)

    @contextlib.asynccontextmanager
    async def _leased(self, entry: ImageEntry) -> AsyncIterator[Leased]:
        leased = await self._catalogue.lease(entry.namespace, entry.keys, _LEASE_MS)
        try:
            yield leased
        finally:
            if leased.lease:
                await self._catalogue.release(leased.lease)


async def _ended_well(events: AsyncIterator[object]) -> None:
    """Follow a transfer to its end. Raises the first node's failure."""
    failed: NodeOutcome | None = None
    async for event in events:
        if isinstance(event, NodeOutcome) and event.error_code:
            failed = failed or event
    if failed is None:
        return
    kind = by_code(failed.error_code)
    if not failed.quiesced and not issubclass(kind, Unavailable | InternalError):
        kind = Unavailable  # it may still be using the memory
    raise kind(failed.error_message)
