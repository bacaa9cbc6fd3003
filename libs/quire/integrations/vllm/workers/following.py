"""A load that receives blocks while another engine stores them.

A prefill engine computes a long prompt in several steps, and stores the blocks of each. They are received step by step:
a part of the prompt has all of its layers here before the next part is computed there. Each part is received layer by
layer behind the engine that computes it. If that fails, another engine may take its place.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np

from quire.client import AsyncClient, Buffer, Delivery, SlicePlaces
from quire.integrations.vllm.plan import FollowPlan
from quire.model.descriptor import DeliveryOrder
from quire.model.errors import DeadlineExceeded, QuireError
from quire.model.urgency import Urgency
from quire.telemetry import logger

_PART_S: Final = 0.1
"""Wait for the rest of a prompt before a part of it is received."""
_AGAIN_S: Final = 1.0
"""Wait for another store of chunks whose store failed, for example by another prefill engine."""
_PAUSE_S: Final = 0.05
_QUIET_S: Final = 5.0


class Progress(Protocol):
    """A load, as it proceeds; see `quire.integrations.vllm.workers.loads.Load`.

    Attributes:
        delivery: Its current delivery.
        abandoned: Whether the load was given up.
    """

    delivery: Delivery | None
    abandoned: bool

    def note(self, *, arrived: int) -> object:
        """Note how many layers of the current part are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Memory of a load.

    Attributes:
        buffer: Holds it.
        places: Of the load's chunks there.
    """

    buffer: Buffer
    places: SlicePlaces

    @classmethod
    def staged(cls, buffer: Buffer, chunks: int, slab_bytes: int) -> Target:
        """Return staging memory of (layers, chunks, slab bytes)."""
        return cls(buffer=buffer, places=SlicePlaces(chunks * slab_bytes, np.arange(chunks) * slab_bytes))

    def behind(self, chunks: int) -> SlicePlaces:
        """Return the places of the load's chunks behind the first ones."""
        offsets: Any = np.asarray(self.places.chunk_offsets)[chunks:]
        return replace(self.places, chunk_offsets=offsets)


async def follow(
    client: AsyncClient, plan: FollowPlan, shard: int, first: int, target: Target, urgency: Urgency, load: Progress
) -> int:
    """Receive a prefix while it is stored.

    Args:
        client: Of Quire.
        plan: Names the prefix.
        shard: Of the engine.
        first: First chunk to receive.
        target: Memory for the chunks from there on.
        urgency: When they are needed.
        load: The load; it may be given up at any time.

    Returns:
        How many chunks from the start of the prefix are there, those before `first` included.

    Raises:
        QuireError: A look-up failed, or a delivery was refused.
    """

    def begin(delivery: Delivery) -> None:
        load.delivery = delivery

    namespace, keys, at = plan.namespaces[shard], plan.keys[shard], first
    until_s, left_s = time.monotonic() + plan.wait_s, plan.wait_s
    while at < len(keys) and not load.abandoned:
        retrieval = await client.retrieve(
            namespace,
            keys,
            target.buffer,
            first_chunk=at,
            places=target.behind(at - first),
            order=DeliveryOrder.LAYERWISE,
            urgency=urgency,
            lease_ttl_ms=0,
            follow_s=left_s,
            part_s=_PART_S,
            on_begin=begin,
        )
        if retrieval.delivery is not None:
            if await _has_come(retrieval.delivery, load):
                at = retrieval.found.matched_chunks
            else:
                until_s = min(until_s, time.monotonic() + _AGAIN_S)
                await asyncio.sleep(_PAUSE_S)
        if left_s <= 0:
            break
        left_s = max(0.0, until_s - time.monotonic())
    return at


async def _has_come(delivery: Delivery, load: Progress) -> bool:
    """Wait until a delivery has ended, and no node writes to its memory; return whether all of it came."""
    try:
        for layer in range(delivery.num_layers):
            await delivery.arrival(layer)
            load.note(arrived=layer + 1)
        is_whole = True
    except QuireError as error:
        logger().warning("a load lost chunks", error=error.code(), message=str(error))
        is_whole = False
    await quiet(delivery)
    return is_whole


async def quiet(delivery: Delivery) -> None:
    """Wait until no node writes to a delivery's memory."""
    while True:
        try:
            await delivery.quiesced(_QUIET_S)
            return
        except DeadlineExceeded:
            continue
