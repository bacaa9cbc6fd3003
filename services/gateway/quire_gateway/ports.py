"""Ports of the gateway: the orchestrator and the storage nodes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.model.descriptor import RdmaTarget
from quire.model.durability import Durability, OnExisting
from quire.model.hashing import Namespace
from quire.model.health import Check
from quire.model.images import ExpectedImage, ImageEntry, LeasedRecord, Rendering
from quire.model.keys import ChunkKeys
from quire.model.nodes import MemberSpans, Node, NodeAddress
from quire.model.outcome import NodeOutcome
from quire.model.ranges import ChunkRange
from quire.model.records import ChunkRecord
from quire.model.transfers import DeliverOrder, IngestOrder, PrefetchOrder
from quire_server.clock import Clock

__all__ = [
    "Allocated",
    "Allocator",
    "ChunkAttributes",
    "ChunkIndex",
    "Clock",
    "ClusterSpans",
    "Decoded",
    "Decoders",
    "EncodedPicture",
    "Entries",
    "ImageRoute",
    "LayerArrived",
    "LookupCounts",
    "MemberDirectory",
    "RemoteCatalogue",
    "Router",
    "StorageNodes",
]


@dataclass(frozen=True, slots=True)
class LayerArrived:
    """A node's stripe of a layer is complete at the client."""

    node_id: str
    layer: int


@dataclass(frozen=True, slots=True)
class Allocated:
    """Ranges by node, the addresses of those nodes, and how many chunks from the start are stored already."""

    ranges: tuple[ChunkRange, ...]
    nodes: tuple[NodeAddress, ...]
    known_chunks: int


class Allocator(Protocol):
    """The orchestrator, for calls with values of Quire; plain requests are forwarded unchanged."""

    async def allocate(
        self,
        namespace: Namespace,
        keys: ChunkKeys,
        first: int,
        durability: Durability,
        on_existing: OnExisting,
        unchained: bool,
    ) -> Allocated:
        """Return the placement of the unknown chunks."""


class StorageNodes(Protocol):
    """Storage nodes by their gRPC address."""

    def deliver(self, address: str, order: DeliverOrder, lent_ms: int) -> AsyncIterator[LayerArrived | NodeOutcome]:
        """Yield the events of one node's delivery; the outcome comes last.

        Args:
            address: Of the node.
            order: Its part.
            lent_ms: Time for which the client lends its memory; 0 for as long as this gateway permits transfers.
        """

    async def ingest(self, node: NodeAddress, order: IngestOrder, lent_ms: int) -> NodeOutcome:
        """Have a node take its part of a store. See `deliver`."""

    async def stop(self, address: str, transfer_id: bytes, node_index: int) -> None:
        """End one node's part of an aborted transfer. Returns when no byte of it is in flight."""

    async def prefetch(self, address: str, order: PrefetchOrder) -> int:
        """Have chunks brought into a node's memory; how many are there now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRoute:
    """The decoder that should make an image; `build`: of that decoder.

    `ticket` is given back at the end, with the lease in `record`. Without a live decoder `runner` is empty, there is
    nothing to give back, and `build` is the last known one, or empty.
    """

    ticket: int
    runner: str
    runner_address: str
    owner: str
    owner_address: str
    entry: ImageEntry
    build: str
    record: LeasedRecord


@dataclass(frozen=True, slots=True)
class Decoded:
    """Bytes that a decoder wrote."""

    length: int
    source: str
    build: str
    stages_us: dict[str, int]


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    """A record that a decoder wrote; its image's PSNR against the picture in dB, and the largest difference, of 255.

    `first_of_several`: the picture has more frames than the one in the record.
    """

    record_bytes: int
    psnr_db: float
    error_max: int
    first_of_several: bool


class Router(Protocol):
    """The orchestrator, as far as images go."""

    async def route(self, entry: ImageEntry, lease_ttl_ms: int, failed: Sequence[str]) -> ImageRoute:
        """Route an image, with a lease on the record for this time; 0 for none.

        `failed`: decoders that have just not answered.
        """

    async def finish(self, route: ImageRoute, *, failed: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class ChunkAttributes:
    """Attributes of a chunk's object: `size` in bytes, `modified_s` in seconds since the Unix epoch."""

    key: bytes
    generation: int
    size: int
    modified_s: float
    etag: str


class ChunkIndex(Protocol):
    """The orchestrator, as far as single chunks go."""

    async def expect_object(self, record: ChunkRecord) -> bool:
        """An object is about to be written: it stays for a time, and goes if it is not committed by then.

        False while it is being deleted.
        """

    async def commit_object(self, record: ChunkRecord) -> bool:
        """Index a chunk of the object tier; returns whether it is indexed: its parent must be."""

    async def lists_object(self, record: ChunkRecord) -> bool:
        """Whether the object tier is listed as a holder."""

    async def evict_object(self, record: ChunkRecord) -> bool:
        """Whether it is out of the index: nothing extends it, no lease pins it."""


class MemberDirectory(Protocol):
    """The cluster's members, as the orchestrator knows them."""

    async def nodes(self) -> list[Node]: ...
    async def checked(self) -> tuple[list[Node], list[Check]]:
        """Return the members, also storage nodes that are away, and the checks that the cluster fails."""


class RemoteCatalogue(Protocol):
    """The orchestrator, as far as latents go. Images are a tenant's."""

    async def put(self, tenant: str, entry: ImageEntry, expected: ExpectedImage, ttl_ms: int) -> bool:
        """Put an image for this time, 0 for ever; returns whether it replaced another. Raises `ConditionFailed`."""

    async def head(self, tenant: str, image_id: str) -> ImageEntry:
        """Return an image's entry. Raises `ImageMissing`."""

    async def delete(self, tenant: str, image_id: str) -> bool:
        """Whether there was one."""

    async def list(self, tenant: str, prefix: str, after: str, limit: int) -> tuple[list[ImageEntry], str]:
        """A page of images by id, and what to begin the next after; "" for the last."""


class Entries(Protocol):
    """The catalogue in Redis; see `quire_server.redis.Images`."""

    async def get(self, tenant: str, image_id: str) -> ImageEntry | None: ...


class Decoders(Protocol):
    """Decoders by their gRPC address."""

    async def cached(
        self, tenant: str, address: str, entry: ImageEntry, rendering: Rendering, target: RdmaTarget
    ) -> Decoded:
        """Write the image into `target` if the decoder's cache can answer without a decode; the length is 0 if not.

        The cache counts the request in both cases. Cancellation is as in `decode`.
        """

    async def encode(
        self,
        address: str,
        source: RdmaTarget,
        length: int,
        weights_sha256: str,
        target: RdmaTarget,
        background_rgb: int,
    ) -> EncodedPicture:
        """Have a record made of the picture in `source`, on a background, and written into `target`."""

    async def warm(self, address: str, entry: ImageEntry, source: RdmaTarget, length: int) -> None:
        """Have a decoder take a new image's record into its cache."""

    async def decode(self, tenant: str, route: ImageRoute, rendering: Rendering, target: RdmaTarget) -> Decoded:
        """Have an image written into `target` by the decoder that was chosen, for a tenant.

        Cancelled, it raises `Ended` where that decoder has said that it writes no more.
        """


class LookupCounts(Protocol):
    """Hits and misses of this gateway's look-ups."""

    @property
    def asked(self) -> Mapping[tuple[str, str], int]:
        """Chunks by namespace's tag, and `hit` or `miss`."""
        ...

    @property
    def namespaces(self) -> Mapping[str, Namespace]:
        """Namespaces by the tags of `asked`."""
        ...


class ClusterSpans(Protocol):
    """The spans that the members of the cluster keep in memory."""

    def of(self, trace_id: str) -> AsyncGenerator[MemberSpans, None]:
        """Yield the spans of traces whose id has this beginning, as members answer."""
        ...
