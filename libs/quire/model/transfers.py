"""Orders to one storage node: its part of a delivery, prefetch or store. A gateway gives them, the node checks them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from quire.model.descriptor import Descriptor, RdmaTarget
from quire.model.durability import Durability, OnExisting
from quire.model.errors import InvalidRequest, TargetInvalid
from quire.model.keys import ChunkKeys
from quire.model.layout import KvLayout
from quire.model.policy import TenantPolicy
from quire.model.ranges import ChunkRange
from quire.model.records import NO_NAMESPACE, ChunkRecords, records
from quire.model.urgency import Urgency


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverOrder:
    """Chunks of a request, from a node into a client's memory.

    Attributes:
        delivery_id: The client's, 16 bytes.
        descriptor: All keys of the request, and the target.
        ranges: Part of the node.
        node_index: Number of the node among those of the request; it tags UCX messages.
        urgency: When layers are needed.
        layers_in_stream: Report each layer in the RPC's stream, too.
        tenant: Whose delivery it is, and its part of the links.
        unchained: The keys are no prefix: each chunk stands for itself.
        namespace: Tag of the namespace that the keys were derived under; zeros if they were not.
        arriving: Part of the ranges whose store was running when the gateway looked.
        follow_s: For how long chunks of `arriving` are waited for that neither are here nor arrive.
        until_s: End of the permit, on the node's monotonic clock: nothing is written after it.
    """

    delivery_id: bytes
    descriptor: Descriptor
    ranges: tuple[ChunkRange, ...]
    node_index: int = 0
    urgency: Urgency = field(default_factory=Urgency)
    layers_in_stream: bool = False
    tenant: TenantPolicy = field(default_factory=TenantPolicy)
    unchained: bool = False
    namespace: bytes = NO_NAMESPACE
    arriving: tuple[ChunkRange, ...] = ()
    follow_s: float = 0.0
    until_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchOrder:
    """Chunks of a prefix, into the memory of a node.

    Attributes:
        keys: Of the prefix, from its start.
        ranges: Part of the node.
        layout: Of the chunks; None if unknown, then nothing is brought from the object tier.
        within_s: When they are wanted, seconds from now; 0 for soon.
        namespace: Tag of the namespace that the keys were derived under; zeros if they were not.
    """

    keys: ChunkKeys
    ranges: tuple[ChunkRange, ...]
    layout: KvLayout | None = None
    within_s: float = 0.0
    namespace: bytes = NO_NAMESPACE

    def records(self) -> ChunkRecords:
        """Return the index records of the chunks of the ranges, in order."""
        return ChunkRecords.joined(
            [records(self.keys, run.first, run.count, namespace=self.namespace) for run in self.ranges]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestOrder:
    """Chunks of a request, from a client's memory into a node.

    Attributes:
        layout: Of the chunks.
        records: Chunks to store, in prefix order.
        store_id: The client's, 16 bytes.
        source: Memory of the client.
        source_ranges: Places of the records among the chunks of the source.
        source_chunks: Number of chunks in the source.
        node_index: Number of the node among those of the request.
        durability: Meaning of the acknowledgement.
        on_existing: Treatment of chunks that are stored already.
        source_complete: The source has every layer already.
        namespace_digest: Of their namespace, 32 bytes; its tag goes into the records.
        tenant: Name of the tenant; empty without tokens.
        until_s: End of the permit, on the node's monotonic clock: nothing is read after it.

    Raises:
        InvalidRequest: Records and ranges do not fit.
        KeysInvalid: A key appears twice.
        TargetInvalid: The source is smaller than its chunks.
    """

    layout: KvLayout
    records: ChunkRecords
    store_id: bytes
    source: RdmaTarget
    source_ranges: tuple[ChunkRange, ...]
    source_chunks: int
    node_index: int
    durability: Durability
    on_existing: OnExisting
    source_complete: bool = False
    namespace_digest: bytes = b""
    tenant: str = ""
    until_s: float = math.inf

    def __post_init__(self) -> None:
        if not self.records or sum(part.count for part in self.source_ranges) != len(self.records):
            raise InvalidRequest(f"{len(self.records)} chunks do not fill the ranges", field="source_ranges")
        if any(part.first + part.count > self.source_chunks for part in self.source_ranges):
            raise InvalidRequest("a range leaves the source", field="source_ranges")
        ChunkKeys(self.records.keys).distinct()
        needed = self.layout.payload_bytes(self.source_chunks)
        if self.source.length < needed:
            raise TargetInvalid(f"{self.source.length} bytes, but the chunks have {needed}", field="source.length")

    def groups(self, chunks: int) -> list[IngestOrder]:
        """Split the order into parts of `chunks` chunks, in order."""
        places = [(part, at) for part in self.source_ranges for at in range(part.first, part.stop, chunks)]
        groups, first = [], 0
        for part, at in places:
            group = ChunkRange(part.node_id, at, min(part.stop, at + chunks) - at)
            records = self.records[first : first + group.count]
            groups.append(replace(self, records=records, source_ranges=(group,)))
            first += group.count
        return groups
