"""Copies between storage nodes: memory that a silent node may still write to is never given back."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from quire.client.memory.quiescence import unheard_s
from quire.model.descriptor import Descriptor
from quire.model.durability import Durability
from quire.model.errors import ChunkMissing, NodeUnavailable, QuireError, TooManyRequests
from quire.model.index import OBJECT_TIER
from quire.model.nodes import Node, StorageInfo
from quire.model.outcome import NodeOutcome
from quire.model.records import ChunkRecord
from quire.testing import FakeClock
from quire_storage.cluster.redundancy import NOT_YET, digest, start_of
from quire_storage.cluster.replication import COPIED, KEPT, LACKED, Replicator, keepers_of
from quire_storage.config import StorageConfig
from quire_storage.core.checksums import row_checksums
from quire_storage.core.chunks import Chunk
from quire_storage.ports import COPY_S_MAX

SILENCE = NodeUnavailable("no answer")
CLOCK = FakeClock()


class _Region:
    """A registration that, unlike UCX's, keeps nothing alive."""

    address, remote_key = 4096, b"key"

    def __init__(self, buffer: Any) -> None:
        self.length = buffer.nbytes
        self.closed = False

    def close(self) -> None:
        self.closed = True


class _Transport:
    address = b"node"

    def __init__(self) -> None:
        self.regions: list[_Region] = []
        self.memories: list[weakref.ref[Any]] = []

    def register(self, buffer: Any) -> _Region:
        self.regions.append(_Region(buffer))
        self.memories.append(weakref.ref(buffer.base))
        return self.regions[-1]


class _Peers:
    """Each delivery ends with `error`."""

    def __init__(self, error: QuireError) -> None:
        self._error = error

    async def deliver(self, *_: Any) -> Any:
        raise self._error


def _replicator(transport: _Transport, error: QuireError = SILENCE) -> Replicator:
    config, none = StorageConfig(cluster_secret="s"), cast(Any, None)
    return Replicator(
        config=config,
        tiers=none,
        transport=cast(Any, transport),
        index=none,
        registry=none,
        peers=cast(Any, _Peers(error)),
        clock=CLOCK,
        me=none,
    )


def test_of_three_copies_two_are_kept() -> None:
    """All holders choose the same ones, whatever the order in which they are listed; of two copies both."""
    for number in range(50):
        key = number.to_bytes(32, "big")
        three = ["a", OBJECT_TIER, "b", "c"]
        found = keepers_of(key, three, {})
        assert len(found) == 2 and found == keepers_of(key, three[::-1], {})
        assert set(keepers_of(key, ["a", "b", OBJECT_TIER], {})) == {"a", "b"}
        zones = {"a": "one", "b": "one", "c": "two"}
        assert "c" in keepers_of(key, three, zones), "never both in one zone"
        assert set(keepers_of(key, ["a", "b"], zones)) == {"a", "b"}


async def test_memory_of_a_copy_that_a_silent_node_may_still_write_stays_mapped() -> None:
    """Finding 4: the region was unmapped at once, and the next mapping of that size got its address."""
    transport = _Transport()
    replicator = _replicator(transport)
    chunk = Chunk(ChunkRecord(b"k" * 32, b"", b"k" * 32, b""), 2, 64, np.zeros(2, dtype=np.uint32))
    source = Node(node_id="storage-1", about=StorageInfo())
    assert [pair async for pair in replicator._land(source, [chunk])] == []
    gc.collect()
    assert not transport.regions[0].closed
    assert transport.memories[0]() is not None


@pytest.mark.parametrize("changed", [False, True])
async def test_what_has_landed_is_kept_only_if_it_is_what_was_announced(changed: bool) -> None:
    transport = _Transport()
    replicator = _replicator(transport)
    payload = np.arange(128, dtype=np.uint8).reshape(2, 64)
    chunk = Chunk(ChunkRecord(b"k" * 32, b"", b"k" * 32, b""), 2, 64, row_checksums(payload))

    async def deliver(source: Node, descriptor: Descriptor) -> NodeOutcome:
        landed = np.frombuffer(cast(Any, transport.memories[-1]()), dtype=np.uint8)
        landed[:128] = payload.reshape(-1)
        landed[70] ^= changed
        return NodeOutcome("storage-1", (), b"\1", 128, quiesced=True)

    replicator._peers = cast(Any, SimpleNamespace(deliver=deliver))
    sound = [pair async for pair in replicator._land(Node(node_id="storage-1", about=StorageInfo()), [chunk])]
    assert len(sound) == (not changed)


async def test_quarantined_memory_is_bounded() -> None:
    """A node that stays silent costs a bounded amount of memory: then nothing more is lent to it."""
    transport = _Transport()
    replicator = _replicator(transport)
    chunk = Chunk(ChunkRecord(b"k" * 32, b"", b"k" * 32, b""), 2, 64, np.zeros(2, dtype=np.uint32))
    source = Node(node_id="storage-1", about=StorageInfo())
    for _ in range(20):
        assert [pair async for pair in replicator._land(source, [chunk])] == []
    assert len(transport.regions) == 16
    await CLOCK.advance(unheard_s(COPY_S_MAX) - 1.0)
    assert [pair async for pair in replicator._land(source, [chunk])] == []
    assert len(transport.regions) == 16 and not any(region.closed for region in transport.regions)
    await CLOCK.advance(2.0)
    assert [pair async for pair in replicator._land(source, [chunk])] == []
    assert len(transport.regions) == 17, "no permit for it can be used any more"
    assert all(region.closed for region in transport.regions[:16])


@pytest.mark.parametrize("refusal", [TooManyRequests("busy"), ChunkMissing("evicted meanwhile")])
async def test_a_node_that_refuses_costs_no_memory(refusal: QuireError) -> None:
    """Sixteen refusals, over the life of a node, ended all replication."""
    transport = _Transport()
    replicator = _replicator(transport, refusal)
    chunk = Chunk(ChunkRecord(b"k" * 32, b"", b"k" * 32, b""), 2, 64, np.zeros(2, dtype=np.uint32))
    source = Node(node_id="storage-1", about=StorageInfo())
    for _ in range(20):
        assert [pair async for pair in replicator._land(source, [chunk])] == []
    assert len(transport.regions) == 20
    assert all(region.closed for region in transport.regions)


async def test_a_frozen_source_holds_up_no_other() -> None:
    transport = _Transport()
    replicator = _replicator(transport, ChunkMissing("evicted meanwhile"))
    frozen = asyncio.Event()
    answer = replicator._peers.deliver

    async def deliver(source: Node, descriptor: Any) -> Any:
        if source.node_id == "frozen":
            await frozen.wait()
        return await answer(source, descriptor)

    cast(Any, replicator._peers).deliver = deliver
    chunk = Chunk(ChunkRecord(b"k" * 32, b"", b"k" * 32, b""), 2, 64, np.zeros(2, dtype=np.uint32))

    async def pull(name: str) -> list[Any]:
        return [pair async for pair in replicator._land(Node(node_id=name, about=StorageInfo()), [chunk])]

    waiting = [asyncio.create_task(pull("frozen")) for _ in range(8)]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        assert await pull("well") == []
    frozen.set()
    await asyncio.gather(*waiting)


class _Keepers:
    """Peers that have copies on a drive of some chunks, by node; and an index that lists three holders of each."""

    def __init__(self, kept: dict[str, set[bytes]]) -> None:
        self._kept = kept
        self.given_up: list[bytes] = []

    async def storage_nodes(self) -> list[Node]:
        return [Node(node_id=name, about=StorageInfo()) for name in self._kept]

    @property
    def residency(self) -> _Keepers:
        return self

    def recorded(self, key: bytes) -> int:
        return 7

    async def replicate(self, node: Node, generations: Mapping[bytes, int], source: Node) -> list[int]:
        return [key in self._kept[node.node_id] for key in generations]

    async def evict(self, keys: list[bytes], *, keepers: Sequence[str], level: Durability) -> int:
        assert not keys or (keepers, level) == (("b", "c"), Durability.REPLICATED)
        self.given_up += keys
        return len(keys)


async def test_a_copy_is_given_up_only_where_both_others_are_on_drives() -> None:
    """A holder may have a chunk in memory only: it is asked before the third copy goes."""
    one, two, three = (bytes([number]) * 32 for number in range(3))
    world = _Keepers({"b": {one, two}, "c": {two, three}})
    config, none = StorageConfig(cluster_secret="s"), cast(Any, None)
    me = Node(node_id="a", about=StorageInfo())
    peers: Any = world
    replicator = Replicator(
        config=config,
        tiers=peers,
        transport=cast(Any, _Transport()),
        index=none,
        registry=none,
        peers=peers,
        clock=CLOCK,
        me=lambda: me,
    )
    await replicator.give_up([one, two, three], ("b", "c"), Durability.REPLICATED)
    assert world.given_up == [two]
    await replicator.give_up([two], ("b", "lost"), Durability.REPLICATED)
    assert world.given_up == [two], "one of them is not there"


class _Slow:
    """Tiers, index and other nodes at once. `targets`: nodes that were asked to copy; they do when `go` is set."""

    def __init__(self, keys: list[bytes]) -> None:
        self.residency, self.replicated = self, keys[::-1]
        self.objects: Any = None
        self.targets: list[str] = []
        self.go = asyncio.Event()
        self.mark = COPIED
        self.holders: tuple[str, ...] = ("me",)

    def find_all(self, keys: list[bytes]) -> list[Chunk]:
        return [Chunk(ChunkRecord(key, b"", key, b""), 1, 8, np.zeros(1, np.uint32)) for key in keys]

    async def locate(self, records: list[ChunkRecord]) -> list[tuple[str, ...]]:
        return [self.holders] * len(records)

    async def storage_nodes(self) -> list[Node]:
        return [Node(node_id=name, about=StorageInfo()) for name in ("me", "a", "b", "c", "d")]

    def recorded(self, key: bytes) -> int:
        return 7

    async def replicate(self, target: Node, generations: Mapping[bytes, int], source: Node) -> list[int]:
        self.targets.append(target.node_id)
        await self.go.wait()
        return [self.mark] * len(generations)


def _replicator_of(slow: Any) -> Replicator:
    return Replicator(
        config=StorageConfig(cluster_secret="s", node_id="me"),
        tiers=slow,
        transport=slow,
        index=slow,
        registry=slow,
        peers=slow,
        clock=CLOCK,
        me=lambda: Node(node_id="me", about=StorageInfo()),
    )


async def test_what_is_being_stored_is_not_copied_a_second_time() -> None:
    """A check of all copies, while a store waits for its second one, chose another node: there were three."""
    keys = [number.to_bytes(32, "big") for number in range(8)]
    slow: Any = _Slow(keys)
    replicator = _replicator_of(slow)
    storing = asyncio.create_task(replicator.spread(keys))
    await asyncio.sleep(0)
    checking = asyncio.create_task(replicator.keep_replicated())
    for _ in range(20):
        await CLOCK.advance(1.0)
    slow.go.set()
    assert await storing == set(keys) and len(slow.targets) == 1
    checking.cancel()


async def test_a_change_among_nodes_concerns_what_the_lost_one_held() -> None:
    """Every change had all replicated chunks located again, by every node."""
    keys = [number.to_bytes(32, "big") for number in range(8)]
    slow: Any = _Slow(keys)
    slow.go.set()
    replicator = _replicator_of(slow)
    assert await replicator.spread(keys[:5]) == set(keys[:5])
    (target,) = slow.targets
    live = {(name, "/0") for name in ("me", *"abcd")}
    assert set(await replicator._without_copy(live)) == set(keys[5:]), "not looked at yet"
    assert set(await replicator._without_copy(live - {(target, "/0")})) == set(keys)
    assert set(await replicator._without_copy(live - {(target, "/0")} | {(target, "again/0")})) == set(keys)


@pytest.mark.parametrize("holders", [("me",), ("me", OBJECT_TIER), ("me", "a")])
@pytest.mark.parametrize("mark", [KEPT, COPIED])
async def test_what_is_copied_is_paced_and_nothing_else(holders: tuple[str, ...], mark: int) -> None:
    """Not by what the index lists: it lists a node that came back empty for a while, and always the object tier."""
    keys = [number.to_bytes(32, "big") for number in range(8)]
    slow: Any = _Slow(keys)
    slow.holders, slow.mark = holders, mark
    slow.go.set()
    safe, copied_bytes = await _replicator_of(slow)._spread(keys)
    assert safe == set(keys)
    assert copied_bytes == (8 * 8 if mark == COPIED else 0)


async def _in_time(work: Coroutine[Any, Any, bool]) -> bool:
    task = asyncio.create_task(work)
    await CLOCK.advance(60.0)
    return await asyncio.wait_for(task, 5)


async def test_copies_that_cannot_be_made_are_told() -> None:
    """All others are full: the gate of a roll stays closed, and it opens when one has room again."""
    keys = [number.to_bytes(32, "big") for number in range(8)]
    slow: Any = _Slow(keys)
    slow.go.set()
    replicator = _replicator_of(slow)
    nodes = set(map(start_of, await slow.storage_nodes()))
    assert replicator.checked_among == NOT_YET
    slow.mark = LACKED
    assert not await _in_time(replicator._respread(nodes))
    assert replicator.alone == 8 and replicator.checked_among == NOT_YET
    slow.mark = COPIED
    assert await _in_time(replicator._respread(nodes))
    replicator._known = nodes
    assert replicator.alone == 0 and replicator.checked_among == digest(nodes)
    slow.mark = LACKED  # the one that had the copies let them go
    await replicator._patrol()
    assert replicator.alone == 8 and replicator.checked_among == NOT_YET
    slow.mark = COPIED
    await replicator._patrol()
    assert replicator.alone == 0 and replicator.checked_among == digest(nodes)


async def test_a_node_that_lost_a_drive_is_another_than_before() -> None:
    def node(capacity_bytes: int) -> tuple[str, str]:
        return start_of(Node(node_id="a", about=StorageInfo(capacity_bytes=capacity_bytes), incarnation="1"))

    assert node(2 << 30) != node(1 << 30)


class _Pulling:
    """Tiers of a node that pulls: notes in which entries its copies are to be listed."""

    def __init__(self, present: set[bytes]) -> None:
        self._present = present
        self.joined: list[dict[bytes, int]] = []
        self.registered: list[bytes] = []

    def find(self, key: bytes) -> object | None:
        return key if key in self._present else None

    async def raise_level(self, keys: Sequence[bytes], level: Durability) -> list[bytes]:
        return list(keys)

    async def join(self, generations: Mapping[bytes, int]) -> set[bytes]:
        self.joined.append(dict(generations))
        return set(generations) & self._present

    async def reregister(self, keys: Sequence[bytes]) -> set[bytes]:
        self.registered += keys
        return set(keys)


async def test_copies_are_listed_in_the_entries_of_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Present copies join these entries, pulled ones are stored with them. A node of the release before names none."""
    present_key, absent_key, unnamed_key = (bytes([number]) * 32 for number in range(3))
    pulling: Any = _Pulling({present_key, unnamed_key})
    replicator = _replicator_of(pulling)
    pulls: list[Any] = []

    async def pull_some(source: Node, keys: Sequence[bytes], level: Durability, within: dict[bytes, int]) -> set[bytes]:
        pulls.append((list(keys), within))
        return set()

    monkeypatch.setattr(replicator, "_pull_some", pull_some)
    source = Node(node_id="a", about=StorageInfo())
    assert await replicator.pull(source, {present_key: 5, absent_key: 6, unnamed_key: 0}) == [KEPT, LACKED, KEPT]
    assert pulls == [([absent_key], {present_key: 5, absent_key: 6})]
    assert pulling.joined == [{present_key: 5, absent_key: 6}] and pulling.registered == [unnamed_key]


async def test_what_no_entry_lists_is_not_copied() -> None:
    """Without an entry the target cannot detect an eviction during the copy."""
    keys = [number.to_bytes(32, "big") for number in range(4)]
    slow: Any = _Slow(keys)
    slow.go.set()
    slow.recorded = lambda key: int(key == keys[0])
    assert await _replicator_of(slow).spread(keys) == {keys[0]}
    slow.recorded = lambda key: 0
    slow.targets.clear()
    assert await _replicator_of(slow).spread(keys) == set() and slow.targets == []
