"""When a node that is to be removed reports that it is done: what its peers confirm counts, not what is listed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from quire.model.durability import Durability
from quire.model.errors import NodeUnavailable, NotImplementedHere, QuireError
from quire.model.index import OBJECT_TIER
from quire.model.nodes import Location, Node, StorageInfo, StorageState
from quire.model.records import ChunkRecord
from quire.testing import FakeClock
from quire_storage.cluster.draining import Activity, Drainer
from quire_storage.cluster.replication import COPIED, KEPT, LACKED
from quire_storage.config import StorageConfig
from quire_storage.core.chunks import Chunk, Header

_DRAINING, _OUT, _ACTIVE = StorageState.DRAINING, StorageState.DECOMMISSIONED, StorageState.ACTIVE
_KEY = b"k" * 32


def _node(name: str) -> Node:
    return Node(node_id=name, about=StorageInfo(), incarnation="one")


@dataclass
class _World:
    """A node `me` with one chunk. `peers`: what each other node answers; an error is raised."""

    level: Durability = Durability.LOCAL
    listed: tuple[str, ...] = ("me",)
    peers: dict[str, int | QuireError] = field(default_factory=lambda: {"a": COPIED, "b": COPIED})
    nodes: dict[str, Node] = field(default_factory=lambda: {name: _node(name) for name in ("me", "a", "b")})
    readable: bool = True
    recorded_: int = 7
    retired_: dict[bytes, int] = field(default_factory=dict)
    activity: Activity = field(default_factory=lambda: Activity(0, 0))
    asked: list[tuple[str, Durability]] = field(default_factory=list)
    clock: FakeClock = field(default_factory=FakeClock)

    def drainer(self) -> Drainer:
        this: Any = self
        drainer = Drainer(
            config=StorageConfig(node_id="me", orchestrator_address="o:1", cluster_secret="s" * 32),
            tiers=this,
            index=this,
            peers=this,
            replicator=this,
            clock=_NoPause(),
            activity=lambda: self.activity,
            me=lambda: self.nodes["me"],
        )
        drainer.told(_DRAINING)
        return drainer

    @property
    def residency(self) -> Any:
        return self

    def __len__(self) -> int:
        return 1

    def recorded(self, key: bytes) -> int:
        return self.recorded_

    def retired(self) -> dict[bytes, int]:
        return self.retired_

    def scan(self) -> Iterator[list[bytes]]:
        yield [_KEY]

    def find(self, key: bytes) -> Header | None:
        chunk = Chunk(ChunkRecord(key, b"", key, b""), 1, 64, np.zeros(1, dtype=np.uint32))
        return Header(chunk, self.level, generation=7) if self.readable else None

    def find_all(self, keys: Sequence[bytes]) -> list[Chunk]:
        return [header.chunk for key in keys if (header := self.find(key)) is not None]

    async def locate(self, records: Sequence[ChunkRecord]) -> list[tuple[str, ...]]:
        return [self.listed] * len(records)

    async def storage_nodes(self) -> list[Node]:
        return list(self.nodes.values())

    async def candidates(self, keys: Sequence[bytes], already: set[str]) -> list[Node]:
        return [node for name, node in self.nodes.items() if name != "me" and node.stays]

    async def entries_of(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        return dict.fromkeys(keys, 7)

    async def replicate(
        self, node: Node, generations: Mapping[bytes, int], source: Node, *, level: Durability
    ) -> list[int]:
        self.asked.append((node.node_id, level))
        answer = self.peers[node.node_id]
        if isinstance(answer, QuireError):
            raise answer
        return [answer] * len(generations)


class _NoPause(FakeClock):
    async def sleep(self, seconds: float) -> None:
        return


@pytest.mark.parametrize(
    ("world", "reached", "asked"),
    [
        (_World(), _DRAINING, ["a"]),
        (_World(listed=("me", "b")), _DRAINING, ["b"]),
        (_World(listed=("me", "b"), peers={"a": COPIED, "b": LACKED}), _DRAINING, ["b", "a"]),
        (_World(listed=(), peers={"a": LACKED, "b": LACKED}), _ACTIVE, ["a", "b"]),
        (_World(listed=("me", OBJECT_TIER)), _DRAINING, []),
        (_World(level=Durability.OBJECT), _ACTIVE, []),
        (_World(level=Durability.REPLICATED), _DRAINING, ["a", "b"]),
        (_World(level=Durability.REPLICATED, peers={"a": KEPT, "b": LACKED}), _ACTIVE, ["a", "b"]),
        (_World(peers={"a": NodeUnavailable("it drains"), "b": KEPT}), _DRAINING, ["a", "b"]),
        (_World(retired_={b"r" * 32: 3}, peers={"a": KEPT, "b": LACKED}), _DRAINING, ["a", "a"]),
        (_World(retired_={b"r" * 32: 3}, readable=False, peers={"a": LACKED, "b": LACKED}), _ACTIVE, ["a", "b"]),
        (_World(listed=(), recorded_=0, level=Durability.OBJECT), _DRAINING, []),
        (_World(peers={"a": NotImplementedHere("no drive"), "b": KEPT}), _DRAINING, ["a", "b"]),
        (_World(activity=Activity(1, 1)), _ACTIVE, ["a"]),
        (_World(readable=False), _DRAINING, []),
    ],
    ids=[
        *("copied", "confirmed", "listed, but not there", "nobody has it", "in the object tier", "not yet there"),
        *("replicated", "one of two", "one refuses", "a drive failed", "and nobody else has it"),
        *("read from the object tier", "a node without drives", "a store runs", "evicted"),
    ],
)
async def test_what_counts(world: _World, reached: StorageState, asked: list[str]) -> None:
    drainer = world.drainer()
    await drainer._look()
    assert drainer.reached is reached and [name for name, _ in world.asked] == asked
    assert (drainer.left > 0) == (reached is _ACTIVE and not world.activity.running)
    assert {level for _, level in world.asked} <= {world.level}


async def test_nodes_that_leave_are_not_asked() -> None:
    world = _World()
    world.nodes["a"] = replace(world.nodes["a"], state=_DRAINING)
    drainer = world.drainer()
    await drainer._look()
    assert drainer.reached is _DRAINING and world.asked == [("b", Durability.LOCAL)]


@pytest.mark.parametrize("change", ["a store", "a restart", "a node leaves"])
async def test_a_change_has_it_look_again(change: str) -> None:
    """Nothing is asked twice while all is as it was; decommissioned then, it is done at once."""
    world = _World()
    drainer = world.drainer()
    await drainer._look()
    await drainer._look()
    drainer.told(_OUT)
    assert drainer.reached is _ACTIVE, "until it has looked whether anything has changed"
    await drainer._look()
    assert drainer.reached is _OUT and len(world.asked) == 1
    match change:
        case "a store":
            world.activity = Activity(0, 1)
        case "a restart":
            world.nodes["a"] = replace(world.nodes["a"], incarnation="two")
        case _:
            del world.nodes["b"]
    world.peers = dict.fromkeys(world.peers, LACKED)
    await drainer._look()
    assert drainer.reached is _ACTIVE and drainer.left == 1


async def test_a_store_during_the_pass_voids_it() -> None:
    world = _World()
    drainer = world.drainer()
    replicate = world.replicate

    async def while_stored(*arguments: Any, **options: Any) -> list[int]:
        world.activity = Activity(0, world.activity.started + 1)
        return await replicate(*arguments, **options)

    world.replicate = while_stored  # type: ignore[method-assign]
    await drainer._look()
    assert drainer.reached is _ACTIVE
    world.replicate = replicate  # type: ignore[method-assign]
    await drainer._look()
    assert drainer.reached is _DRAINING


async def test_undone_it_is_done_with_nothing() -> None:
    world = _World()
    drainer = world.drainer()
    await drainer._look()
    drainer.told(_ACTIVE)
    assert drainer.reached is _ACTIVE and drainer.left == 0
    world.peers = dict.fromkeys(world.peers, LACKED)
    drainer.told(_DRAINING)
    await drainer._look()
    assert drainer.reached is _ACTIVE, "what was confirmed before is of no use"


async def test_the_second_copy_is_in_another_zone_than_the_first() -> None:
    """A holder that is listed comes first; one in its own zone is not the second, though it is farther from here."""
    world = _World(level=Durability.REPLICATED, listed=("me", "c"), peers=dict.fromkeys("bcd", KEPT))
    zones = {"me": "one", "b": "one", "c": "two", "d": "two"}
    world.nodes = {name: replace(_node(name), location=Location(name, zone)) for name, zone in zones.items()}
    await world.drainer()._look()
    assert [name for name, _ in world.asked] == ["c", "b"]


async def test_a_node_that_failed_is_asked_again_later_and_for_other_levels_at_once() -> None:
    world = _World()
    drainer = world.drainer()
    world.peers["a"] = NodeUnavailable("it is full")
    target, asked = world.nodes["a"], {_KEY: 7}
    assert await drainer._asked(target, asked, Durability.LOCAL) == {}
    world.peers["a"] = KEPT
    assert await drainer._asked(target, asked, Durability.LOCAL) == {}, "a moment ago it failed"
    assert await drainer._asked(target, asked, Durability.MEMORY) == {_KEY: KEPT}
    for _ in range(20):
        await drainer._asked(world.nodes["b"], asked, Durability.LOCAL)
    assert await drainer._asked(target, asked, Durability.LOCAL) == {_KEY: KEPT}
