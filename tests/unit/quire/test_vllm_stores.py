"""Which of a request's stores begin, and when, without vLLM and without a node."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from quire.client import Buffer
from quire.integrations.staging import StagingPool
from quire.integrations.vllm.plan import StorePlan
from quire.integrations.vllm.workers.stores import BlockStores
from quire.integrations.vllm.workers.worker import WorkerParts
from quire.model.durability import Durability
from quire.model.errors import InvalidRequest
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.telemetry import headers
from quire.transport.devices import HostStream
from quire.transport.memory import MemoryTransport

SLAB = 4096
SPACE = Namespace("m", "w", KvLayout(1, 32, 2, 16, Dtype.BF16))


class _Blocks:
    num_layers, slab_bytes = 1, SLAB

    def take(self, layer: int, blocks: tuple[int, ...], into: np.ndarray[Any, Any]) -> None:
        into[:] = 1


class _Session:
    def __init__(self, client: _Client, first: int, count: int) -> None:
        self._client, self._stop = client, first + count

    def layer_ready(self, layer: int) -> None:
        pass

    async def commit(self) -> None:
        await asyncio.sleep(0.01)
        self._client.stored = max(self._client.stored, self._stop)


class _Client:
    """A client and its loop; what it stores must go on from what it has, as at the gateway."""

    def __init__(self) -> None:
        self.asynchronous, self.stored, self.failing = self, 0, False
        self.works: list[Future[Any]] = []
        self.traces: list[str] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    async def store(self, namespace: Namespace, keys: ChunkKeys, first: int, memory: Buffer, **_: Any) -> _Session:
        self.traces.append(headers().get("traceparent", ""))
        if self.failing or first > self.stored:
            raise InvalidRequest("would have no parent", field="first_chunk")
        return _Session(self, first, memory.length // SLAB)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        self.works.append(asyncio.run_coroutine_threadsafe(work, self._loop))
        return self.works[-1]

    def post(self, call: Any) -> None:
        self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


class _Worker:
    def __init__(self, room: int) -> None:
        self.client, self.counted = _Client(), dict[str, float]()
        client: Any = self.client
        blocks: Any = _Blocks()
        pool = StagingPool(Buffer.allocate(MemoryTransport(), room * SLAB))
        parts = WorkerParts(client=client, blocks=blocks, pool=pool, copies=HostStream(), shard=0, count=self._count)
        self.stores = BlockStores(parts, Durability.MEMORY)

    def step(
        self, first: int, stop: int, known: int = 0, *, requests: tuple[str, ...] = ("r",), handed_over: bool = False
    ) -> None:
        for name in requests:
            self.stores.start(self._plan(name, first, stop, known, handed_over=handed_over))
        self.stores.finish_step()

    @staticmethod
    def _plan(name: str, first: int, stop: int, known: int, *, handed_over: bool = False, trace: str = "") -> StorePlan:
        return StorePlan(
            request_id=name,
            group=0,
            namespaces=(SPACE,),
            keys=(ChunkKeys(bytes(32 * stop)),),
            known=known,
            first=first,
            blocks=tuple(range(first, stop)),
            handed_over=handed_over,
            trace={"traceparent": trace} if trace else {},
        )

    def left_out(self) -> list[tuple[int, bool]]:
        return [(each.first, each.later) for each in self.stores.unstored()]

    def settled(self) -> dict[str, float]:
        """What was counted once all stores are over."""
        for work in self.client.works:
            work.result(10)
        return {name: value for name, value in self.counted.items() if value}

    def _count(self, name: str, value: float) -> None:
        self.counted[name] = self.counted.get(name, 0) + value


@pytest.fixture
def worker() -> Iterator[_Worker]:
    made = _Worker(room=16)
    yield made
    made.client.close()


def test_a_store_belongs_to_the_trace_of_its_request(worker: _Worker) -> None:
    traces = [f"00-0af7651916cd43dd8448eb211c80319{digit}-b7ad6b7169203331-01" for digit in "ab"]
    for number, trace in enumerate([*traces, ""]):
        worker.stores.start(worker._plan(str(number), 0, 2, 0, trace=trace))
    worker.stores.finish_step()
    worker.settled()
    assert worker.client.traces == [*traces, ""]


def test_a_requests_stores_wait_for_each_other(worker: _Worker) -> None:
    """Steps are quicker than acknowledgements; a store must go on from what is stored."""
    for at in range(4):
        worker.step(2 * at, 2 * at + 2)
    assert worker.settled() == {"stored_blocks": 8}
    assert not worker.left_out() and worker.client.stored == 8


def test_behind_what_was_not_stored_nothing_is_tried(worker: _Worker) -> None:
    worker.client.failing = True
    worker.step(0, 2)
    worker.step(2, 4)
    assert worker.settled() == {"unstored_blocks": 4}
    assert worker.left_out() == [(0, False), (2, False)]


def test_behind_what_found_no_room_the_next_step_waits_too(worker: _Worker) -> None:
    """vLLM may plan a step before it hears that the one before had no room."""
    worker.step(0, 20)
    worker.step(20, 22)
    assert worker.left_out() == [(0, True), (20, True)] and not worker.counted
    worker.step(0, 4)
    worker.step(4, 8)
    assert worker.settled() == {"stored_blocks": 8}
    assert not worker.left_out()


def test_what_quire_has_by_now_can_be_gone_on_from(worker: _Worker) -> None:
    """A request that was looked up again, after another engine had stored more of it."""
    worker.step(0, 20)
    worker.client.stored = 6
    worker.step(6, 8, known=6)
    assert worker.settled() == {"stored_blocks": 2}
    worker.stores.finished("r")
    worker.step(0, 2)
    assert worker.settled() == {"stored_blocks": 4}


@pytest.mark.parametrize("handed_over", [False, True])
def test_prompts_for_other_engines_are_stored_however_many_end_in_a_step(handed_over: bool) -> None:
    """Others are stored in a later step; these have none, and an engine waits for them."""
    worker, names = _Worker(room=32), tuple(f"r{number}" for number in range(24))
    worker.step(0, 1, requests=names, handed_over=handed_over)
    worker.settled()
    assert len(worker.left_out()) == (0 if handed_over else 8)
    worker.client.close()
