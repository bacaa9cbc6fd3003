"""Fetches, stores and images through the gateway's own objects, with fakes of what it calls: in milliseconds."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from quire.client.memory.remote_memory import PeerTransfers
from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.durability import Durability, OnExisting
from quire.model.errors import (
    ChunkMissing,
    ConditionFailed,
    ImageMissing,
    InvalidRequest,
    NoDecoder,
    NodeUnavailable,
    PeerLost,
    QuireError,
    Unavailable,
)
from quire.model.hashing import Namespace
from quire.model.images import ExpectedImage, ImageAttributes, ImageEntry, LeasedRecord, Rendering, entry_of_record
from quire.model.keys import ChunkKeys
from quire.model.latents import LatentInfo, Normalisation, RecordInvalid, Vae, encode_record
from quire.model.layout import Dtype, KvLayout
from quire.model.lease import Lease
from quire.model.nodes import DecoderInfo, KnownVae, Node, NodeAddress
from quire.model.outcome import FetchSummary, NodeOutcome, StoreSummary
from quire.model.policy import TenantPolicy
from quire.model.provenance import GENERATED
from quire.model.ranges import ChunkRange
from quire.model.transfers import DeliverOrder, IngestOrder
from quire.model.urgency import Urgency
from quire.testing import FakeClock
from quire.testing.running_stores import MemoryRunningStores
from quire.transport.memory import MemoryTransport
from quire_gateway.config import GatewayConfig
from quire_gateway.core.preconditions import Preconditions
from quire_gateway.errors import TransfersExhausted
from quire_gateway.images.latents import LatentGateway
from quire_gateway.images.owners import ImageOwners
from quire_gateway.images.reads import ImageReads
from quire_gateway.images.service import ImageService
from quire_gateway.images.vaes import KnownVaes
from quire_gateway.kv.following import Announcements
from quire_gateway.kv.leases import Leases
from quire_gateway.kv.single_chunk import SingleChunkReads
from quire_gateway.kv.transfers import FetchCall, KvTransfers, StoreCall, StorePlacement
from quire_gateway.ports import Allocated, Decoded, ImageRoute, LayerArrived
from quire_server.lookups import LookupAnswer, Question

SPACE = Namespace("model", "v1", KvLayout(2, 16, 1, 32, Dtype.FP16))
KEYS = ChunkKeys(b"".join(bytes([index]) * 32 for index in range(10)))
VAE = KnownVae(weights_sha256="ab" * 32, name="small", channels=4, scale=8)
TENANT = TenantPolicy("t", 2.0, 7)


def _lease(clock: FakeClock, *ranges: ChunkRange, keys: ChunkKeys = KEYS) -> Lease:
    return Lease(
        lease_id=b"i" * 16,
        tip=keys.at(len(keys) - 1),
        tip_bucket=keys.at(0),
        expires_ms=clock.now_ms() + 1000,
        ranges=ranges,
        addresses={"a": "a:1", "b": "b:1"},
        tenant=TENANT,
    )


@dataclass
class World:
    """Two storage nodes, an orchestrator, a decoder: what they were asked, and what they answer."""

    clock: FakeClock = field(default_factory=FakeClock)
    failing: dict[str, QuireError] = field(default_factory=dict)
    delivered: list[tuple[str, DeliverOrder]] = field(default_factory=list)
    ingested: list[tuple[str, IngestOrder]] = field(default_factory=list)
    images: dict[str, ImageEntry] = field(default_factory=dict)
    given_back: list[bytes] = field(default_factory=list)
    transport: MemoryTransport = field(default_factory=MemoryTransport)
    peer: MemoryTransport = field(default_factory=MemoryTransport)
    records: dict[bytes, bytes] = field(default_factory=dict)
    decoder_fails: list[QuireError] = field(default_factory=list)
    holders: list[str] = field(default_factory=list)
    vaes: dict[str, tuple[KnownVae, ...]] = field(default_factory=lambda: {"d": (VAE,)})
    vaes_soon: dict[str, tuple[KnownVae, ...]] = field(default_factory=dict)
    reads: bool = False
    blamed: int = 0
    asked: list[str] = field(default_factory=list)
    owner_fails: list[QuireError] = field(default_factory=list)
    stored: list[tuple[str, bytes]] = field(default_factory=list)
    passed_over: list[list[str]] = field(default_factory=list)
    rendition: bytes = b""
    builds: dict[str, str] = field(default_factory=dict)
    signer: str = ""
    replaced: list[ImageEntry] = field(default_factory=list)

    def gateway(self, **settings: Any) -> KvTransfers:
        this: Any = self
        config = GatewayConfig(cluster_secret="s" * 32, **settings)
        announcements = Announcements(MemoryRunningStores(), FakeClock(), 1000)
        return KvTransfers(config=config, allocator=this, nodes=this, announcements=announcements)

    def singles(self) -> SingleChunkReads:
        this: Any = self
        return SingleChunkReads(this, self.gateway())

    def own_memory(self, kept_bytes: int = 0) -> ImageService:
        this: Any = self
        return ImageService(
            images=ImageReads(
                entries=this, owners=ImageOwners(this, self.clock), router=this, decoders=this, clock=self.clock
            ),
            latents=LatentGateway(self.gateway(), this, self.singles(), Leases(this)),
            catalogue=this,
            memory=PeerTransfers(self.transport),
            vaes=KnownVaes(this),
            reach=AsyncMock(),
            kept_bytes=kept_bytes,
            stored=lambda entry, record: self.stored.append((entry.image_id, record)),
        )

    # ---- the cluster's members

    @property
    def live(self) -> dict[str, Node]:
        return {
            name: Node(
                node_id=name,
                about=DecoderInfo(build=self.builds.get(name, ""), vaes=vaes, signer=self.signer),
                grpc_address="d:1",
            )
            for name, vaes in self.vaes.items()
        }

    async def refresh(self) -> None:
        self.vaes |= self.vaes_soon

    # ---- storage nodes

    async def deliver(
        self, address: str, part: DeliverOrder, lent_ms: int
    ) -> AsyncIterator[LayerArrived | NodeOutcome]:
        self.delivered.append((address, part))
        node = part.ranges[0].node_id
        if node in self.failing:
            raise self.failing[node]
        if data := self.records.get(part.descriptor.keys.at(0)):
            await PeerTransfers(self.peer).push(data, part.descriptor.target)
        if part.layers_in_stream:
            yield LayerArrived(node, 0)
        yield NodeOutcome(node, part.ranges, b"\1" * sum(each.count for each in part.ranges), 5, quiesced=True)

    async def ingest(self, node: NodeAddress, part: IngestOrder, lent_ms: int) -> NodeOutcome:
        self.ingested.append((node.grpc_address, part))
        if self.reads:
            self.records[part.records[0].key] = await PeerTransfers(self.peer).pull(part.source, part.source.length)
        return NodeOutcome("a", part.source_ranges, b"\1" * len(part.records), 9, quiesced=True)

    # ---- the orchestrator

    async def allocate(self, namespace: Namespace, keys: ChunkKeys, first: int, *rest: object) -> Allocated:
        return Allocated((ChunkRange("a", first, len(keys) - first),), (NodeAddress("a", "a:1", b"w"),), first)

    async def lookup(self, question: Question) -> LookupAnswer:
        if question.keys.at(0) not in self.records:
            return LookupAnswer()
        mine = ChunkRange(self.holders.pop(0) if self.holders else "a", 0, 1)
        found = LookupAnswer([mine], [NodeAddress(mine.node_id, f"{mine.node_id}:1", b"w")], TENANT)
        if not question.lease_ttl_ms:
            return found
        return replace(found, lease=_lease(self.clock, mine, keys=question.keys), token=b"token")

    async def put(self, tenant: str, entry: ImageEntry, expected: ExpectedImage, ttl_ms: int = 0) -> bool:
        replaced = entry.image_id in self.images
        self.images[entry.image_id] = entry
        return replaced

    async def head(self, tenant: str, image_id: str) -> ImageEntry:
        return self.images[image_id]

    async def release(self, lease: bytes) -> None:
        self.given_back.append(lease)

    async def nodes(self) -> list[Node]:
        return []

    async def route(self, entry: ImageEntry, lease_ttl_ms: int, failed: Sequence[str]) -> ImageRoute:
        self.passed_over.append(list(failed))
        record = LeasedRecord(b"leased") if lease_ttl_ms else LeasedRecord()
        entry = self.replaced.pop() if lease_ttl_ms and self.replaced else entry
        return ImageRoute(
            ticket=1,
            runner="d",
            runner_address="d:1",
            owner="d",
            owner_address="d:1",
            entry=entry,
            build="build",
            record=record,
        )

    async def finish(self, route: ImageRoute, *, failed: bool) -> None:
        self.blamed += failed
        self.given_back.append(route.record.lease)

    async def get(self, tenant: str, image_id: str) -> ImageEntry | None:
        return self.images.get(image_id)

    # ---- the decoder

    async def cached(
        self, tenant: str, address: str, entry: ImageEntry, rendering: Rendering, target: RdmaTarget
    ) -> Decoded:
        self.asked.append(address)
        if self.owner_fails:
            raise self.owner_fails.pop()
        if self.rendition:
            await PeerTransfers(self.peer).push(self.rendition, target)
        return Decoded(len(self.rendition), "rendition", "build", {})

    async def decode(self, tenant: str, route: ImageRoute, rendering: Rendering, target: RdmaTarget) -> Decoded:
        if self.decoder_fails:
            raise self.decoder_fails.pop()
        assert route.record.lease == b"leased"
        await PeerTransfers(self.peer).push(b"an image", target)
        return Decoded(8, "miss", "build", {"decode": 1})


def _fetch(world: World, lease: Lease, **changes: Any) -> FetchCall:
    target = RdmaTarget(b"w", 4096, 1 << 20, b"k")
    layout = SPACE.layout
    descriptor = Descriptor(KEYS, layout.num_layers, 16, layout.slice_bytes, DeliveryOrder.AUTO, target)
    described = replace(descriptor, **changes)
    urgency = Urgency(compute_window_us=3)
    return FetchCall(found=lease, delivery_id=b"d" * 16, descriptor=described, urgency=urgency)


async def _all(events: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in events]


async def test_each_node_gets_its_part_of_what_the_lease_says() -> None:
    world = World()
    lease = _lease(world.clock, ChunkRange("a", 0, 4), ChunkRange("b", 4, 3), ChunkRange("a", 7, 3))
    events = await _all(world.gateway().fetch(_fetch(world, lease, first_chunk=2, chunk_count=6)))
    parts = dict(world.delivered)
    assert parts["a:1"].ranges == (ChunkRange("a", 2, 2), ChunkRange("a", 7, 1))
    assert parts["b:1"].ranges == (ChunkRange("b", 4, 3),)
    assert {part.node_index for part in parts.values()} == {0, 1}
    assert all(part.tenant == TENANT for part in parts.values())
    assert events[-1] == FetchSummary(6, 10, delivered=b"\1" * 6)


async def test_a_single_chunk_is_read_where_it_went() -> None:
    """One that has left its node since the look-up is asked for where it is now; nothing is leased."""
    world = World(failing={"a": ChunkMissing("moved")}, holders=["a", "b"])
    key = KEYS.run(0, 1)
    world.records[key.at(0)] = b""
    descriptor = _fetch(world, _lease(world.clock, ChunkRange("a", 0, 10)), keys=key).descriptor
    summary = await world.singles().read(SPACE, descriptor, b"d" * 16, "the chunk")
    assert summary.usable_chunks == 1 and [address for address, _ in world.delivered] == ["a:1", "b:1"]
    assert all(part.tenant == TENANT for _, part in world.delivered)


async def test_a_single_chunk_that_is_gone_is_looked_for_once_more() -> None:
    world = World(failing={"a": ChunkMissing("gone")})
    key = KEYS.run(0, 1)
    world.records[key.at(0)] = b""
    descriptor = _fetch(world, _lease(world.clock, ChunkRange("a", 0, 10)), keys=key).descriptor
    with pytest.raises(ChunkMissing, match="the chunk is not stored"):
        await world.singles().read(SPACE, descriptor, b"d" * 16, "the chunk")
    assert len(world.delivered) == 1
    del world.records[key.at(0)]
    with pytest.raises(ChunkMissing, match="the chunk is not stored"):
        await world.singles().read(SPACE, descriptor, b"d" * 16, "the chunk")


def _never_asked() -> NodeUnavailable:
    error = NodeUnavailable("refused")
    error.unsent = True
    return error


@pytest.mark.parametrize(
    ("error", "quiesced"),
    [(ChunkMissing("gone"), True), (NodeUnavailable("away"), False), (_never_asked(), True)],
)
async def test_a_node_that_fails_costs_its_own_part(error: QuireError, quiesced: bool) -> None:
    """One that refused has written nothing; one that cannot be heard may still be writing."""
    world = World(failing={"b": error})
    lease = _lease(world.clock, ChunkRange("a", 0, 4), ChunkRange("b", 4, 6))
    *outcomes, summary = await _all(world.gateway().fetch(_fetch(world, lease)))
    failed = next(each for each in outcomes if each.error_code)
    assert (failed.node_id, failed.quiesced, failed.error_code) == ("b", quiesced, error.code())
    assert summary.usable_chunks == 4
    with pytest.raises(type(error)):
        await world.gateway().fetch_whole(_fetch(world, lease))


async def test_a_refusal_that_is_not_quiesced_is_told_as_unavailable() -> None:
    outcome = NodeOutcome("a", (), b"", quiesced=False, error_code=ChunkMissing.code(), error_message="gone")
    with pytest.raises(Unavailable):
        outcome.check()
    with pytest.raises(PeerLost):
        replace(outcome, error_code=PeerLost.code()).check()
    replace(outcome, error_code="").check()


async def test_a_store_tells_where_it_goes_first() -> None:
    world = World()
    store = StoreCall(
        namespace=SPACE,
        keys=KEYS,
        first=4,
        store_id=b"s" * 16,
        source=RdmaTarget(b"w", 4096, SPACE.layout.payload_bytes(6), b"k"),
        durability=Durability.MEMORY,
        on_existing=OnExisting.SKIP,
    )
    first, _, last = await _all(world.gateway().store(store))
    assert isinstance(first, StorePlacement) and first.ranges == (ChunkRange("a", 4, 6),)
    (_, part) = world.ingested[0]
    assert part.source_ranges == (ChunkRange("a", 0, 6),) and part.records[0].parent == KEYS.at(3)
    assert last == StoreSummary(6, 4, 9)
    with pytest.raises(TransfersExhausted):
        await _all(world.gateway(transfers_max=0).store(store))


async def test_latents_and_images_without_memory_of_the_clients() -> None:
    """A record goes in and comes back; an image needs one route, and a decoder that fails is passed over once."""
    world = World(reads=True)
    await world.transport.start()
    await world.peer.start()
    own = world.own_memory()
    values = np.zeros((4, 8, 8), dtype=np.float16)
    record = encode_record(values, LatentInfo((4, 8, 8), "float16", Vae("v", "", "AB" * 32), 64, 64, Normalisation()))
    entry = await own.put_record("t", "one", record)
    assert entry.record_sha256 == hashlib.sha256(record).digest()
    assert await own.get_record("t", "one") == (entry, record)
    served, data = await own.get("t", "one", Rendering("png"))
    assert (data, served.source, served.length) == (b"an image", "miss", 8)
    unchanged, body = await own.get("t", "one", Rendering("png"), Preconditions(if_none_match=served.etag))
    assert (unchanged.etag, unchanged.length, body) == (served.etag, 0, b"")
    world.decoder_fails.append(NodeUnavailable("d"))
    assert (await own.get("t", "one", Rendering("png")))[1] == b"an image"
    assert world.given_back.count(b"leased") == 3, "a failed route's too"
    del world.records[entry.keys.at(0)]
    with pytest.raises(ChunkMissing):
        await own.get_record("t", "one")


async def test_a_decoder_is_blamed_for_its_own_failures_alone() -> None:
    """Not for an answer that it gave; and an image that was replaced meanwhile is asked for once more."""
    world = World(reads=True)
    await world.transport.start()
    await world.peer.start()
    own = world.own_memory()
    values = np.zeros((4, 8, 8), dtype=np.float16)
    record = encode_record(values, LatentInfo((4, 8, 8), "float16", Vae("v", "", "AB" * 32), 64, 64, Normalisation()))
    entry = await own.put_record("t", "one", record)
    answered = NodeUnavailable("its storage node is away")
    answered.answered = True
    world.decoder_fails = [answered]
    assert (await own.get("t", entry.image_id, Rendering("png")))[1] == b"an image"
    assert world.blamed == 0
    world.decoder_fails = [NodeUnavailable("connection reset")]
    assert (await own.get("t", entry.image_id, Rendering("png")))[1] == b"an image"
    assert world.blamed == 1
    world.decoder_fails = [ChunkMissing("replaced")]
    assert (await own.get("t", entry.image_id, Rendering("png")))[1] == b"an image"
    world.replaced = [entry_of_record("one", _record(1))[0]]
    served, data = await own.get("t", entry.image_id, Rendering("png"))
    assert (data, served.entry.version, world.replaced) == (b"an image", entry.version, []), "described again"


async def test_what_the_owner_has_cached_takes_no_route() -> None:
    """Nor does an image that the client has. An owner that does not answer is passed over, here and where decoders are
    chosen.
    """
    world = World(reads=True, rendition=b"small", builds={"d": "build"})
    await world.transport.start()
    await world.peer.start()
    own, png = world.own_memory(), Rendering("png")
    values = np.zeros((4, 8, 8), dtype=np.float16)
    await own.put_record(
        "t", "one", encode_record(values, LatentInfo((4, 8, 8), "float16", Vae("v", "", "ab" * 32), 64, 64))
    )
    served, data = await own.get("t", "one", png)
    assert (data, served.source, served.decoder, world.passed_over) == (b"small", "rendition", "d", [])
    unchanged, body = await own.get("t", "one", png, Preconditions(if_none_match=served.etag))
    assert (unchanged.etag, body, world.asked) == (served.etag, b"", ["d:1"]), "the decoder was not asked"
    world.owner_fails = [NodeUnavailable("connection reset")]
    assert (await own.get("t", "one", png))[1] == b"an image", "made where the orchestrator says"
    assert world.passed_over == [["d"]]
    await own.get("t", "one", png)
    assert world.asked == ["d:1"] * 2, "not again so soon"
    await world.clock.advance(10)
    assert (await own.get("t", "one", png))[1] == b"small"
    with pytest.raises(ConditionFailed):
        await own.get("t", "one", png, Preconditions(if_match='"another"'))
    with pytest.raises(ImageMissing, match="no version"):
        await own.get("t", "one", png, version="another")
    with pytest.raises(ImageMissing):
        await own.get("t", "none", png)


def _record(seed: int = 0) -> bytes:
    values = np.full((4, 8, 8), seed, dtype=np.float16)
    return encode_record(values, LatentInfo((4, 8, 8), "float16", Vae("v", "", "ab" * 32), 64, 64))


async def test_what_was_just_sent_is_sent_again_while_it_is_so() -> None:
    """Without a decoder; not once the image was replaced or deleted, nor for one that another gets in another form."""
    world = World(reads=True, rendition=b"small", builds={"d": "build"})
    await world.transport.start()
    await world.peer.start()
    own, png = world.own_memory(kept_bytes=1000), Rendering("png")
    await own.put_record("t", "one", _record())
    assert world.stored == [("one", _record())]
    first, _ = await own.get("t", "one", png)
    again, data = await own.get("t", "one", png)
    assert (again.source, again.etag, data, world.asked) == ("gateway", first.etag, b"small", ["d:1"])
    unchanged, body = await own.get("t", "one", png, Preconditions(if_none_match=first.etag))
    assert (unchanged.length, body) == (0, b"")
    await own.get("t", "one", Rendering("jpeg", 80))
    assert len(world.asked) == 2, "another form"
    world.rendition = b"other"
    await own.put_record("t", "one", _record(1))
    assert (await own.get("t", "one", png))[1] == b"other"
    del world.images["one"]
    with pytest.raises(ImageMissing):
        await own.get("t", "one", png)
    world.images["two"] = replace(entry_of_record("two", _record())[0], expires_ms=world.clock.now_ms() + 5000)
    await own.get("t", "two", png)
    await world.clock.advance(5)
    with pytest.raises(ImageMissing):
        await own.get("t", "two", png)


async def test_a_record_in_a_clients_memory_is_named_by_its_own_bytes() -> None:
    """What a client would call it does not count: it is read, checked and stored from here."""
    world = World(reads=True)
    await world.transport.start()
    await world.peer.start()
    own, taking = world.own_memory(), {"durability": Durability.LOCAL, "expected": ExpectedImage()}
    values = np.zeros((4, 8, 8), dtype=np.float16)
    record = encode_record(values, LatentInfo((4, 8, 8), "float16", Vae("v", "", "ab" * 32), 64, 64))
    with PeerTransfers(world.peer).lend(record) as source:
        entry = await own.take_record("t", "one", source, len(record), allow_unknown_vae=False, **taking)  # type: ignore[arg-type]
    assert entry.record_sha256 == hashlib.sha256(record).digest()
    assert world.records[entry.keys.at(0)][: len(record)] == record
    for damaged, length in (
        (record[:30] + b"?" + record[31:], len(record)),
        (record, len(record) - 1),
        (record, 0),
        (record, 1 << 40),
    ):
        with PeerTransfers(world.peer).lend(damaged) as source, pytest.raises(InvalidRequest):
            await own.take_record("t", "bad", source, length, allow_unknown_vae=True, **taking)  # type: ignore[arg-type]
    assert list(world.images) == ["one"] and len(world.records) == 1


async def test_only_what_a_decoder_decodes_is_stored() -> None:
    world = World(reads=True, vaes={})
    await world.transport.start()
    await world.peer.start()
    own, values = world.own_memory(), np.zeros((4, 8, 8), dtype=np.float16)
    record = encode_record(values, LatentInfo((4, 8, 8), "float16", Vae("v", "", "ab" * 32), 64, 64))
    with pytest.raises(NoDecoder, match="allow_unknown_vae"):
        await own.put_record("t", "early", record)
    await own.put_record("t", "archive", record, allow_unknown_vae=True)
    world.vaes_soon = {"d": (VAE,)}  # it came a moment ago, and is not seen yet
    await own.put_record("t", "one", record)
    world.vaes, world.vaes_soon = {}, {}
    await own.put_record("t", "two", record)  # by what the last decoder had
    other = encode_record(values, LatentInfo((4, 8, 8), "float16", Vae("v", "", "cd" * 32), 64, 64))
    with pytest.raises(RecordInvalid, match=r"cdcdcdcdcdcd….*small \(abababababab…\)"):
        await own.put_record("t", "other", other)
    assert sorted(world.images) == ["archive", "one", "two"]


async def test_provenance_is_stored_where_a_decoder_signs() -> None:
    world = World(reads=True)
    await world.transport.start()
    await world.peer.start()
    own, generated = world.own_memory(), ImageAttributes(provenance="generated")
    with pytest.raises(InvalidRequest, match="QUIRE_DECODER_PROVENANCE"):
        await own.put_record("t", "one", _record(), attributes=generated)
    world.signer = "a certificate"
    entry = await own.put_record("t", "one", _record(), attributes=generated)
    assert entry.provenance == world.images["one"].provenance == GENERATED
