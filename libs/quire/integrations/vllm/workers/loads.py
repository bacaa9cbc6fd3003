"""The worker's half of loads: chunks from storage nodes into vLLM's blocks, straight or by way of staging memory.

A load ends when every storage node has stopped writing for it: vLLM keeps its blocks until then. A staged load that is
given up ends at once: its memory is in quarantine until every node has stopped writing there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from quire.client import Buffer, Delivery, Lookup, SlicePlaces
from quire.integrations.vllm.plan import LoadPlan, LoadTime, Settled, TryPlan, is_cold
from quire.integrations.vllm.scheduler.load_cost import LinkTime, late
from quire.integrations.vllm.workers.following import Target, follow, quiet
from quire.integrations.vllm.workers.worker import WorkerParts
from quire.model.descriptor import DeliveryOrder
from quire.model.errors import QuireError
from quire.model.outcome import NodeOutcome
from quire.model.urgency import Urgency
from quire.telemetry import logger, within
from quire.transport.devices import PASSED, Event

_STAGED_QUIET_S: Final = 0.25
_LOOK_S: Final = 0.02
_PAUSE_S: Final = 0.001
_SPARE: Final = 0.5


@dataclass(slots=True, eq=False)
class Load:
    """Load of one request.

    `arrived`: layers that are complete; `ended`: every node has stopped writing; `missing`: block ids.

    `copying`: it is copied from staging memory to vLLM's blocks, between the events `dependency` and `last_copy`;
    `quarantined`: given up while a node may write to its staging memory; `wanted_ns`: when vLLM waited for each layer.
    """

    plan: LoadPlan
    found: Lookup | None
    staging: Buffer | None
    link: LinkTime
    dependency: Event = PASSED
    last_copy: Event = PASSED
    begun_s: float = field(default_factory=time.monotonic)
    arrived: int = 0
    failed: bool = False
    ended: bool = False
    abandoned: bool = False
    copying: bool = False
    quarantined: bool = False
    copied: int = 0
    noted: bool = False
    took_s: float = 0.0
    first_s: float = 0.0
    _began: float = 0.0
    wanted_ns: list[int] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)
    delivery: Delivery | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._began = self.link.begin() if self.is_timed else 0.0

    @property
    def is_timed(self) -> bool:
        """Whether its duration shows the link's rate. That of a load that follows a store shows the producer's."""
        return self.plan.follow is None

    def end_time(self) -> None:
        """Note that the load has left the link."""
        if self.is_timed:
            self.link.end()

    @property
    def alone_s(self) -> float:
        """Return for how long it has run, as if it had the link alone."""
        return self.link.now_s() - self._began

    def layer(self, layer: int, timeout_s: float) -> bool:
        """Wait for a layer; whether it came."""
        until_s = time.monotonic() + timeout_s
        with self.changed:
            while not (self.arrived > layer or self.failed or self.ended or self.late):
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    break
                self.changed.wait(min(left_s, _LOOK_S))
            return self.arrived > layer

    @property
    def late(self) -> bool:
        """Return whether computing its blocks is quicker than the rest of the load."""
        return late(
            self.alone_s,
            self.first_s,
            self.arrived,
            self.delivery.num_layers if self.delivery else 1,
            self.plan.worth_s,
        )

    def end(self, timeout_s: float) -> bool:
        """Wait until it has ended; whether it has."""
        with self.changed:
            return self.changed.wait_for(lambda: self.ended, timeout_s)

    def note(self, *, arrived: int | None = None, failed: bool = False, ended: bool = False) -> bool:
        """Something happened on the client's loop; whether the load is in quarantine."""
        with self.changed:
            self.arrived = arrived if arrived is not None else self.arrived
            self.first_s = self.alone_s if arrived == 1 else self.first_s
            self.failed, self.ended = self.failed or failed, self.ended or ended
            self.changed.notify_all()
            return self.quarantined

    def begin_copy(self) -> bool:
        """Whether vLLM still waits for what arrived."""
        with self.changed:
            self.copying = not self.quarantined
            return self.copying

    def quarantine(self) -> bool:
        """Leave the memory of a staged load that failed to its nodes; False where it has ended, or is being copied."""
        with self.changed:
            self.quarantined = self.staging is not None and self.failed and not self.ended and not self.copying
            return self.quarantined


class Loads:
    """Runs the loads of one worker and group.

    Args:
        parts: Parts that loads and stores share.
        direct: vLLM's blocks as one registered range, with layer stride and offsets of blocks; None to stage all loads.
        timeout_s: Time after which a load is given up.
        link: Clock of the link, shared by the groups of a worker.
    """

    def __init__(
        self,
        parts: WorkerParts,
        *,
        direct: tuple[Buffer, int, np.ndarray[tuple[int], np.dtype[np.int64]]] | None,
        timeout_s: float,
        link: LinkTime,
    ) -> None:
        self._client, self._blocks, self._pool, self._copies = parts.client, parts.blocks, parts.pool, parts.copies
        self._shard = parts.shard
        self._count = parts.count
        self._direct = direct
        self._timeout_s = timeout_s
        self._layerwise: list[Load] = []
        self._asynchronous: dict[str, Load] = {}
        self._bad: set[int] = set()
        self._times: list[LoadTime] = []
        self._link = link
        self._trying = False
        self._settled: list[Settled] = []
        self._news = threading.Event()

    def start(self, plan: LoadPlan) -> None:
        """Start the delivery. Blocks without room in staging memory count as missing."""
        staging = None
        if self._direct is None and plan.blocks:
            staging = self._pool.take(len(plan.blocks) * self._blocks.num_layers * self._blocks.slab_bytes)
        lookup = plan.found[self._shard] if plan.found else None
        load = Load(plan, lookup, staging, self._link, self._copies.record())  # vLLM may still read what was there
        if plan.asynchronous:
            self._asynchronous[plan.request_id] = load
        else:
            self._layerwise.append(load)
        if not plan.blocks:  # no layer reads what is in front of its window
            self._end(load)
            return
        if self._direct is None and staging is None:
            logger().warning("no staging memory for a load", blocks=len(plan.blocks))
            load.missing = set(plan.blocks)
            self._end(load)
            return
        self._client.spawn(within(load.plan.trace, self._run, load))

    def _end(self, load: Load) -> None:
        """End a load without a delivery."""
        load.note(failed=bool(load.missing), ended=True)
        load.end_time()
        self._client.spawn(self._release(load.found))

    def try_out(self, plan: TryPlan) -> None:
        """Deliver it to staging memory, for the time that it takes; one at a time, and where there is room."""
        size = plan.count * self._blocks.num_layers * self._blocks.slab_bytes
        staging = None if self._trying else self._pool.take(size)
        if staging is None:
            self._client.spawn(self._release(plan.found[self._shard]))
            return
        self._trying = True
        self._client.spawn(self._try(plan, staging))

    # ---- layer by layer

    def layer(self, layer: int) -> None:
        """Return when the layer is in vLLM's blocks, or will not be."""
        for load in self._layerwise:
            if layer == len(load.wanted_ns):
                load.wanted_ns.append(time.monotonic_ns())
            if not load.failed and not load.layer(layer, self._timeout_s):
                load.failed = True
                self._give_up(load)
                self._note_late(load)
            if not load.failed:
                self._copy(load, layer + 1)
                self._copies.order(load.last_copy)

    def finish_step(self) -> None:
        """The step is over: blocks that did not arrive are known, and no node writes to blocks of this step's loads."""
        self.layer(self._blocks.num_layers - 1)
        for load in self._layerwise:
            self._settle(load)
        self._layerwise = []

    def settled(self) -> list[Settled]:
        """Loads that are over, since this was last asked."""
        settled, self._settled = self._settled, []
        return settled

    def _settle(self, load: Load) -> None:
        """End a load that vLLM waits for."""
        while not load.end(_STAGED_QUIET_S if load.staging is not None and load.failed else self._timeout_s):
            if load.quarantine():  # no node writes to vLLM's blocks; the staging memory waits
                self._report(load, set(load.plan.blocks))
                return
            logger().error("vLLM waits: a storage node may still write to its blocks", request=load.plan.request_id)
            self._give_up(load)
        if load.failed:
            # Attention has run without some layers of every block, and others may share what did arrive.
            load.missing = set(load.plan.blocks)
        self._conclude(load)

    def _conclude(self, load: Load) -> None:
        """Finish a load that has ended: copy the layers that are not yet in its blocks, and report the rest."""
        if len(load.missing) < len(load.plan.blocks):
            self._copy_whole(load)
        self._give_back(load)
        self._report(load, load.missing)

    def _report(self, load: Load, failed: set[int]) -> None:
        self._bad |= failed
        plan = load.plan
        self._settled.append(Settled(request_id=plan.request_id, group=plan.group, arrived=not failed))
        if load.delivery is not None and not failed and len(load.wanted_ns) == self._blocks.num_layers:
            self._client.post(partial(load.delivery.wanted, load.wanted_ns))
        if plan.blocks and not failed and not load.noted and load.is_timed:
            self._note_time(load.plan, len(load.plan.blocks), load.took_s or load.alone_s)
        self._count("failed_blocks", len(failed))
        self._count("loaded_blocks", len(load.plan.blocks) - len(failed))
        self._count("loads_s", time.monotonic() - load.begun_s)

    def _give_back(self, load: Load) -> None:
        """Give staging memory back that no node writes to, once no copy reads it."""
        if load.staging is not None:
            load.last_copy.synchronize()
            self._pool.give_back(load.staging)

    def _copy_whole(self, load: Load) -> None:
        """Return when all layers are in vLLM's blocks."""
        self._copy(load, self._blocks.num_layers)
        load.last_copy.synchronize()

    def _copy(self, load: Load, stop: int) -> None:
        """Begin copies of layers up to `stop` out of staging memory; of a load that has failed, what arrived whole."""
        if load.staging is None:
            return
        blocks = load.plan.blocks
        layers = load.staging.layers(self._blocks.num_layers, len(blocks), self._blocks.slab_bytes)
        present = [at for at, block in enumerate(blocks) if block not in load.missing]
        for layer in range(load.copied, stop):
            if len(present) == len(blocks):
                copy = partial(self._blocks.put, layer, blocks, layers[layer])
            elif present:
                copy = partial(self._blocks.put, layer, [blocks[at] for at in present], layers[layer][present])
            else:
                continue
            load.last_copy = self._copies.submit(copy, load.dependency)
        load.copied = max(load.copied, stop)

    # ---- beside the steps

    def abandon(self, request_id: str) -> None:
        """Note that the request is over. The load is reported as received once it has ended."""
        load = self._asynchronous.get(request_id)
        if load is not None:
            self._give_up(load)

    def pause(self) -> None:
        """Give the processor, and Python's lock, to awaited loads, in a step in which nothing is computed."""
        self._news.wait(_PAUSE_S)
        self._news.clear()

    def received(self) -> dict[str, bool]:
        """Requests whose load has ended since this was last asked, and whether all of it arrived."""
        done = {}
        for request_id, load in list(self._asynchronous.items()):
            if not load.wanted_ns:  # a step has ended: the request might have been in the next one
                load.wanted_ns = [time.monotonic_ns()] * self._blocks.num_layers
            if load.ended:
                self._conclude(load)
                done[request_id] = not load.missing
            elif load.quarantine():
                self._report(load, set(load.plan.blocks))
                done[request_id] = False
            elif load.late or time.monotonic() - load.begun_s > self._timeout_s:
                if not load.noted:
                    self._give_up(load)
                    self._note_late(load)
                continue
            else:
                continue
            del self._asynchronous[request_id]
        return done

    def times(self) -> list[LoadTime]:
        """Times of loads that ended, since this was last asked."""
        times, self._times = self._times, []
        return times

    def _note_time(self, plan: LoadPlan | TryPlan, blocks: int, seconds: float) -> None:
        self._times.append(LoadTime(blocks, seconds, is_cold(plan, blocks)))

    def _note_late(self, load: Load) -> None:
        """Once, of one that is given up while it still might come: as long as it would have taken."""
        if load.noted:
            return
        load.noted = True
        layers = self._blocks.num_layers
        if load.is_timed:
            self._note_time(load.plan, len(load.plan.blocks), load.alone_s * layers / max(load.arrived, 0.5))
        self._count("late_blocks", len(load.plan.blocks))

    def missing(self) -> set[int]:
        """Blocks that did not arrive, since this was last asked."""
        failed, self._bad = self._bad, set()
        return failed

    # ---- on the client's loop

    def _give_up(self, load: Load) -> None:
        def stop() -> None:
            load.abandoned = True
            load.note(failed=True)
            if load.delivery is not None:
                load.delivery.abandon()

        self._client.post(stop)

    async def _run(self, load: Load) -> None:
        try:
            load.missing = await self._deliver(load)
        except QuireError as error:
            load.missing = set(load.plan.blocks)
            logger().warning("a load failed; its blocks are computed", error=error.code(), message=str(error))
        except Exception as error:  # a fault of ours must not leave vLLM waiting
            load.missing = set(load.plan.blocks)
            logger().error("a load broke off", exc_info=error)
        load.note(failed=bool(load.missing))
        load.end_time()
        if load.delivery is not None:
            await quiet(load.delivery)
        if load.plan.asynchronous and not load.missing and load.begin_copy():
            try:
                await asyncio.get_running_loop().run_in_executor(None, self._copy_whole, load)
            except Exception as error:
                load.missing = set(load.plan.blocks)
                logger().error("a load could not be copied into its blocks", exc_info=error)
        if load.note(ended=True):
            self._give_back(load)
        self._news.set()
        await self._release(load.found)

    async def _deliver(self, load: Load) -> set[int]:
        """Blocks that did not arrive."""
        plan, client = load.plan, self._client.asynchronous
        count = len(plan.blocks)
        places: SlicePlaces | None = None
        buffer = load.staging
        if buffer is None:
            assert self._direct is not None, "straight into the blocks"
            buffer, stride, offsets = self._direct
            places = SlicePlaces(stride, offsets[list(plan.blocks)])
        await client.reach()
        if load.staging is None:  # vLLM may still read its blocks
            while not load.dependency.query():
                await asyncio.sleep(_PAUSE_S)
        if load.abandoned:
            return set(plan.blocks)
        urgency = self._urgency(plan)
        if plan.follow is not None:
            target = (
                Target.staged(buffer, count, self._blocks.slab_bytes)
                if places is None
                else Target(buffer=buffer, places=places)
            )
            received = await follow(client, plan.follow, self._shard, plan.first, target, urgency, load)
            return set(plan.blocks[received - plan.first :])
        assert load.found is not None, "it was looked up"
        load.delivery = await client.fetch(
            load.found,
            buffer,
            first_chunk=plan.first,
            chunk_count=count,
            places=places,
            order=DeliveryOrder.AUTO if plan.asynchronous else DeliveryOrder.LAYERWISE,
            urgency=urgency,
        )
        try:
            for layer in range(self._blocks.num_layers):
                await load.delivery.arrival(layer)
                load.note(arrived=layer + 1)
            load.took_s = load.alone_s
            return set()
        except QuireError as error:
            load.note(failed=True)
            if load.abandoned:
                return set(plan.blocks)
            logger().warning("a load lost chunks; their blocks are computed", error=error.code(), message=str(error))
            summary = await load.delivery.summary()
            return _missing(plan, summary.outcomes)

    def _urgency(self, plan: LoadPlan) -> Urgency:
        """Return when vLLM needs the layers of a load.

        A layerwise load has the time that the step computes for each layer. An asynchronous load has to end before the
        step does, or its request waits for another step: all layers are needed after half of the step's time.
        """
        hidden_us = round(plan.hidden_s * 1e6)
        if plan.asynchronous:
            return Urgency(first_layer_us=round(_SPARE * hidden_us), priority=plan.priority)
        return Urgency(compute_window_us=hidden_us // self._blocks.num_layers, priority=plan.priority)

    async def _try(self, plan: TryPlan, staging: Buffer) -> None:
        began, delivery = self._link.begin(), None
        try:
            async with asyncio.timeout(self._timeout_s):
                delivery = await self._client.asynchronous.fetch(
                    plan.found[self._shard], staging, first_chunk=plan.first, chunk_count=plan.count
                )
                await delivery.summary()
            self._note_time(plan, plan.count, self._link.now_s() - began)
        except Exception as error:  # whatever it was: there are other tries
            logger().debug("a try failed", error=repr(error))
            if delivery is not None:
                delivery.abandon()
        finally:
            self._link.end()
            self._trying = False
            self._pool.give_back_when_idle(staging)
        await self._release(plan.found[self._shard])

    async def _release(self, lookup: Lookup | None) -> None:
        if lookup is None:
            return
        try:
            await self._client.asynchronous.release(lookup)
        except QuireError as error:
            logger().debug("a lease stays until it runs out", error=str(error))


def _missing(plan: LoadPlan, outcomes: tuple[NodeOutcome, ...]) -> set[int]:
    """Return the blocks that a delivery did not bring, by each node's report of its ranges."""
    arrived: set[int] = set()
    for outcome in outcomes:
        marks = iter(outcome.delivered)
        for run in outcome.ranges:
            arrived |= {chunk for chunk in range(run.first, run.stop) if next(marks, 0)}
    return {block for at, block in enumerate(plan.blocks) if plan.first + at not in arrived}
