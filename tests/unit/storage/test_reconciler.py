"""Whether a node sees that the index went back, though nothing that is listed for the node differs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any

import pytest

from quire.model.errors import MetadataUnavailable
from quire.model.index import Drop, Held, Listing
from quire.model.records import ChunkRecord
from quire.testing import FakeClock
from quire_server.membership.heartbeat import ClusterNews
from quire_storage.cluster.reconciler import Reconciler
from quire_storage.cluster.registry import Registry


class _Index:
    """Knows of `changes` of this node, and lists nothing for it."""

    def __init__(self) -> None:
        self.changes = 0
        self.damages = 0

    async def withdraw(self, node_id: str, records: list[ChunkRecord], *, reporter: str, hidden: bool = False) -> None:
        self.changes += reporter == "a"

    async def listing(self, node_id: str) -> Listing:
        return Listing(0, 0, self.changes)

    async def damaged(self, node_id: str) -> None:
        self.damages += 1

    async def drops(self, node_id: str, cursor: int) -> tuple[list[Drop], int]:
        return [], 0

    async def holdings(self, node_id: str, cursor: int) -> tuple[list[Held], int]:
        return [], 0


class _Inline(Executor):
    """Runs what is submitted at once: no thread races the clock."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(fn(*args, **kwargs))
        return done


@contextlib.contextmanager
def _nothing() -> Iterator[set[bytes]]:
    """What arrives meanwhile."""
    yield set()


def _scene() -> tuple[Reconciler, Registry, _Index, FakeClock, list[asyncio.Task[None]]]:
    index, clock, tasks = _Index(), FakeClock(), list[asyncio.Task[None]]()
    anything: Any = index
    registry = Registry("a", anything, clock, 1.0)
    residency = SimpleNamespace(listed_count=0, listed_digest=0, scan=lambda: iter(()), arriving=_nothing)

    async def drop(generations: dict[bytes, int]) -> int:
        return 0

    tiers: Any = SimpleNamespace(residency=residency, objects=None, drop=drop, deny=lambda records: None)

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        tasks.append(asyncio.create_task(work))

    made = Reconciler(tiers=tiers, registry=registry, clock=clock, threads=_Inline(), spawn=spawn)
    return made, registry, index, clock, tasks


@pytest.mark.parametrize(("lost", "damages"), [(0, 0), (1, 1), (3, 1)])
async def test_an_index_that_has_lost_acknowledged_changes_is_reported_once(lost: int, damages: int) -> None:
    """What was stored and let go of in favour of the object tier is listed for no node: only the count tells."""
    reconciler, registry, index, clock, tasks = _scene()
    for _ in range(3):
        await registry.withdraw([ChunkRecord(b"k" * 32, b"", b"k" * 32, b"")])
    index.changes -= lost
    for _ in range(9):  # heartbeats; the first ones bring what was cached
        reconciler.on_news(ClusterNews("", listing=await index.listing("a")))
    await clock.advance(10.0)
    await asyncio.gather(*tasks)
    assert index.damages == damages
    assert registry.changes == index.changes


async def test_a_comparison_that_failed_is_none_and_is_tried_again() -> None:
    """As while Redis fails over: the heartbeat got through, the comparison did not."""
    reconciler, _, index, clock, tasks = _scene()

    async def fails(node_id: str, cursor: int) -> tuple[list[Drop], int]:
        raise MetadataUnavailable("failing over")

    works, index.drops = index.drops, fails  # type: ignore[method-assign]
    news = ClusterNews("epoch", listing=await index.listing("a"))
    reconciler.on_news(news)
    await clock.advance(10.0)
    assert not reconciler.compared
    index.drops = works  # type: ignore[method-assign]
    reconciler.on_news(news)
    await clock.advance(10.0)
    await asyncio.gather(*tasks)
    assert reconciler.compared


async def test_what_the_node_does_not_know_to_be_answered_is_no_damage() -> None:
    """A change whose answer was lost counts at the index alone."""
    reconciler, registry, index, clock, tasks = _scene()
    await registry.withdraw([ChunkRecord(b"k" * 32, b"", b"k" * 32, b"")])
    index.changes += 5
    for _ in range(9):
        reconciler.on_news(ClusterNews("", listing=await index.listing("a")))
    await clock.advance(10.0)
    await asyncio.gather(*tasks)
    assert not index.damages and not tasks


async def test_a_report_whose_answer_was_lost_is_lost_with_an_index_that_goes_back() -> None:
    """Found by the simulator once answers were lost: what the index had counted more hid as many that it lost."""
    reconciler, registry, index, clock, tasks = _scene()
    works = index.withdraw

    async def unanswered(node_id: str, records: list[ChunkRecord], *, reporter: str, hidden: bool = False) -> None:
        await works(node_id, records, reporter=reporter, hidden=hidden)
        raise MetadataUnavailable("the connection broke before the answer came")

    index.withdraw = unanswered  # type: ignore[method-assign]
    await registry.withdraw([ChunkRecord(b"k" * 32, b"", b"k" * 32, b"")])
    assert index.changes - registry.changes == 1
    reconciler.on_news(ClusterNews("", listing=await index.listing("a")))
    await clock.advance(10.0)
    assert (index.changes, registry.changes) == (1, 1)
    before, index.changes = index.damages, 0
    for _ in range(9):
        reconciler.on_news(ClusterNews("", listing=await index.listing("a")))
    await clock.advance(10.0)
    await asyncio.gather(*tasks)
    assert (before, index.damages) == (0, 1)


class _Racing(_Index):
    """Lists nothing, while `lands` comes to the node, or `leaves` it soon after."""

    def __init__(self, keys: dict[bytes, int]) -> None:
        super().__init__()
        self.keys = keys
        self.lands: dict[bytes, int] = {}
        self.leaves = False

    async def holdings(self, node_id: str, cursor: int) -> tuple[list[Held], int]:
        self.keys |= self.lands
        return [], 0

    async def locate(self, records: list[ChunkRecord]) -> list[tuple[str, ...]]:
        if self.leaves:
            self.keys.clear()
        return [()] * len(records)


@pytest.mark.parametrize(("case", "damages"), [("lost", 1), ("lands", 0), ("leaves", 0)])
async def test_what_comes_or_goes_meanwhile_is_not_lost(case: str, damages: int) -> None:
    """An index that was wrongly reported as damaged was told of the object tier, and evicted chunks came back."""
    key = b"k" * 32
    keys = {} if case == "lands" else {key: 5}
    index, clock, tasks = _Racing(keys), FakeClock(), list[asyncio.Task[None]]()
    index.lands, index.leaves = {key: 5} if case == "lands" else {}, case == "leaves"
    record = ChunkRecord(key, b"", key, b"")

    def look(each: bytes) -> tuple[Any, int] | None:
        return (SimpleNamespace(chunk=SimpleNamespace(record=record)), keys[each]) if each in keys else None

    def age(each: bytes) -> int | None:
        return 1 if each in keys else None

    async def drop(generations: dict[bytes, int]) -> int:
        return 0

    asked = list[bytes]()

    async def reregister(missing: list[bytes], *, patient: bool) -> set[bytes]:
        asked.extend(missing)
        return set(missing)

    anything: Any = index
    residency = SimpleNamespace(
        listed_count=1,
        listed_digest=1,
        scan=lambda: iter([list(keys)]),
        arriving=_nothing,
        look=look,
        age=age,
        generation=keys.get,
    )
    tiers: Any = SimpleNamespace(residency=residency, objects=None, drop=drop, reregister=reregister)
    reconciler = Reconciler(
        tiers=tiers,
        registry=Registry("a", anything, clock, 1.0),
        clock=clock,
        threads=_Inline(),
        spawn=lambda work: tasks.append(asyncio.create_task(work)),
    )
    reconciler.on_news(ClusterNews("new", listing=Listing()))
    for _ in range(20):
        await clock.advance(0.5)
    for each in tasks:
        await asyncio.wait_for(each, 10)
    assert index.damages == damages
    assert asked == ([key] if case == "lost" else []), "what the index lost is registered again, once"
