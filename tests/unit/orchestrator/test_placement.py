"""Where new chunks go: spread, bounded, near what they extend."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from quire.model.durability import Durability, OnExisting
from quire.model.keys import ChunkKeys
from quire.model.nodes import Node, StorageInfo
from quire.model.records import records
from quire_orchestrator.core.placement import Placement, Tail
from quire_server.core import placement as reading
from quire_server.core.placement import range_chunks
from tests.unit.orchestrator.world import World

CHUNK = 2 << 20
RANGE = range_chunks(CHUNK)
TRACE = Path(__file__).parents[4] / "shared" / "data" / "mooncake_conversation_trace.jsonl"


def _keys(names: Iterable[object]) -> ChunkKeys:
    """A chain whose keys tell of everything before them, as hashes of prefixes do."""
    made, before = bytearray(), b""
    for name in names:
        before = hashlib.sha256(before + repr(name).encode()).digest()
        made += before
    return ChunkKeys(bytes(made))


def _node(name: str, used: int = 0, capacity: int = 1 << 40) -> Node:
    about = StorageInfo(worker_address=b"w", capacity_bytes=capacity, used_bytes=used)
    return Node(node_id=name, about=about, grpc_address=f"{name}:1")


class Cluster:
    """Sixteen storage nodes that store what an orchestrator allocates, and report every hundred stores."""

    def __init__(self, nodes: int = 16) -> None:
        self.names = [f"n{number}" for number in range(nodes)]
        self.world = World(infos=dict.fromkeys(self.names, StorageInfo(worker_address=b"w", capacity_bytes=1 << 40)))
        self.used: Counter[str] = Counter()

    async def store(self, chains: Iterable[ChunkKeys]) -> None:
        orchestrator = await self.world.start()
        for number, keys in enumerate(chains):
            if number % 100 == 0:
                for name in self.names:
                    self.world.infos[name] = StorageInfo(
                        worker_address=b"w", capacity_bytes=1 << 40, used_bytes=self.used[name]
                    )
                await orchestrator.cluster.refresh()
                await self.world.clock.advance(3.0)
            ranges, _, _ = await orchestrator.allocation.allocate(
                keys, 0, Durability.MEMORY, OnExisting.SKIP, chunk_bytes=CHUNK
            )
            for each in ranges:
                await self.world.index.register(each.node_id, records(keys, each.first, each.count), 0)
                self.used[each.node_id] += each.count * CHUNK
        await orchestrator.close()

    @property
    def fullest(self) -> float:
        """What the fullest node has, over the mean."""
        return max(self.used.values()) / (sum(self.used.values()) / len(self.names))

    async def parts(self, keys: ChunkKeys) -> int:
        """Ranges of one node that a chain lies in."""
        match = await self.world.index.match(keys)
        live = {name: _node(name) for name in self.names}
        return len(reading.readable_ranges(match, live, keys, reading.Reader(CHUNK)))


async def test_conversations_with_one_root_are_spread() -> None:
    """500 of them share chunk 0 alone; each of its 199 chunks lies with its neighbours."""
    cluster, chains = Cluster(), [_keys([0, *((number, at) for at in range(1, 199))]) for number in range(500)]
    await cluster.store(chains)
    assert cluster.fullest <= 1.15
    assert max([await cluster.parts(keys) for keys in chains[:50]]) <= 2 + 198 / RANGE


@pytest.mark.slow
@pytest.mark.skipif(not TRACE.exists(), reason="the production trace is not here")
async def test_the_production_trace_is_spread() -> None:
    with TRACE.open() as lines:
        chains = [_keys(json.loads(line)["hash_ids"]) for line in lines]
    cluster = Cluster()
    await cluster.store(chains)
    assert cluster.fullest <= 1.15


async def test_a_conversation_that_grows_stays_together() -> None:
    """Turn by turn at its end, until a range is full; what two conversations share does not keep them together."""
    cluster = Cluster()
    system = ["system"] * 4
    grown = [*system, *range(2 * RANGE)]
    await cluster.store(_keys(grown[:end]) for end in range(6, len(grown) + 1, 2))
    assert await cluster.parts(_keys(grown)) <= 3
    await cluster.store(_keys([*system, "other", number]) for number in range(40))
    assert len(cluster.used) > 10, "each of these begins a branch"


def test_a_node_that_joins_or_leaves_moves_its_share() -> None:
    chains = [_keys([number, *range(3)]) for number in range(4000)]

    def placed(nodes: int) -> list[str]:
        placement, used, out = Placement(0.0), Counter[str](), []
        for now, keys in enumerate(chains):
            members = [_node(f"n{number}", used[f"n{number}"]) for number in range(nodes)]
            (each,) = placement.place(keys, 0, members, CHUNK, float(now))
            used[each.node_id] += each.count * CHUNK
            out.append(each.node_id)
        return out

    before, after = placed(16), placed(17)
    moved = sum(one != other for one, other in zip(before, after, strict=True))
    share = after.count("n16")
    assert share / len(chains) == pytest.approx(1 / 17, rel=0.2)
    assert moved <= 1.2 * share


def test_a_long_prefix_uses_every_link() -> None:
    nodes = [_node(f"n{number}") for number in range(4)]
    for number in range(50):
        ranges = Placement(0.0).place(_keys([number, *range(8 * RANGE - 1)]), 0, nodes, CHUNK, 0.0)
        held = Counter[str]()
        for each in ranges:
            held[each.node_id] += each.count
        assert set(held.values()) == {2 * RANGE}


def test_space_counts() -> None:
    """A node of twice the size takes twice as much; one that is much fuller than the others takes nothing."""
    taken: Counter[str] = Counter()
    placement = Placement(0.0)
    for number in range(3000):
        nodes = [
            _node("small", taken["small"] * CHUNK, 1 << 36),
            _node("large", taken["large"] * CHUNK, 1 << 37),
            _node("full", (1 << 36) - 1, 1 << 36),
        ]
        (each,) = placement.place(_keys([number]), 0, nodes, CHUNK, float(number))
        taken[each.node_id] += 1
    assert taken["full"] == 0 and 1.8 < taken["large"] / taken["small"] < 2.2


def test_what_is_on_its_way_counts_and_is_sent_there_again() -> None:
    """Nodes say with their heartbeats how full they are: meanwhile a burst does not go to one of them."""
    nodes, placement = [_node(f"n{number}") for number in range(4)], Placement(2.0)
    burst = [placement.place(_keys([number]), 0, nodes, CHUNK, 0.0)[0].node_id for number in range(4000)]
    assert max(Counter(burst).values()) <= 1.15 * 1000
    again = [placement.place(_keys([number]), 0, nodes, CHUNK, 1.0)[0].node_id for number in range(4000)]
    assert again == burst
    gone = [node for node in nodes if node.node_id != burst[0]]
    assert placement.place(_keys([0]), 0, gone, CHUNK, 1.0)[0].node_id != burst[0]
    assert len(placement._sent) <= 4001
    placement.place(_keys(["later"]), 0, nodes, CHUNK, 9.0)
    assert len(placement._sent) == 1 and sum(placement._sent_bytes.values()) == CHUNK, "and forgotten"


def test_a_tail_is_continued_where_it_has_room() -> None:
    nodes = [_node(f"n{number}") for number in range(4)]
    keys = _keys(range(3 * RANGE))
    ranges = Placement(0.0).place(keys, 5, nodes, CHUNK, 0.0, Tail("n2", 7))
    assert (ranges[0].node_id, ranges[0].first) == ("n2", 5) and ranges[0].count in (7, 7 + RANGE)
    assert sum(each.count for each in ranges) == len(keys) - 5
    full = [replace(nodes[2], about=StorageInfo(capacity_bytes=1 << 40, used_bytes=1 << 39)), *nodes[:2], nodes[3]]
    assert Placement(0.0).place(keys, 5, full, CHUNK, 0.0, Tail("n2", 7))[0].node_id != "n2", "it is too full"
    assert Placement(0.0).place(keys, 5, nodes[:2], CHUNK, 0.0, Tail("n2", 7))[0].node_id != "n2", "it is gone"
    assert Placement(0.0).place(keys, len(keys), nodes, CHUNK, 0.0) == []


def test_nodes_are_looked_at_again_once_one_has_reported() -> None:
    """Requests bring the same nodes in lists of their own; a report makes a node that is fuller be passed over."""
    placement, nodes = Placement(60.0), [_node("a"), _node("b")]
    (first,) = placement.place(_keys("k"), 0, nodes, CHUNK, 0.0)
    picture = placement._picture
    placement.place(_keys("l"), 0, list(nodes), CHUNK, 0.0)
    assert placement._picture is picture
    nodes = [_node(each.node_id, used=(1 << 39) * (each.node_id == first.node_id)) for each in nodes]
    (again,) = Placement(60.0).place(_keys("k"), 0, nodes, CHUNK, 0.0)
    (later,) = placement.place(_keys("m"), 0, nodes, CHUNK, 0.0)
    assert placement._picture is not picture
    assert {again.node_id, later.node_id} == {"a", "b"} - {first.node_id}
