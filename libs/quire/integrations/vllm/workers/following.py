"""A load that receives blocks while another engine stores them.

A prefill engine computes a long prompt in several steps, and stores the blocks of each. They are received step by step:
a part of the prompt has all of its layers here before the next part is computed there. Only the last part is received
layer by layer behind the engine that computes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from quire.client import Buffer, Delivery, QuireClient, SlicePlaces
from quire.integrations.vllm.plan import FollowPlan
from quire.model.descriptor import DeliveryOrder
from quire.model.errors import DeadlineExceeded, QuireError
from quire.model.urgency import Urgency
from quire.telemetry import logger

_PART_S: Final = 0.1
"""Wait for the rest of a prompt before a part of it is received; doubled while nothing arrives."""
_PART_S_MAX: Final = 1.0
_QUIET_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """The end of a load that follows stores.

    Attributes:
        chunks: Chunks of the prompt that were received before, or that `last` delivers.
        last: Delivery of the last part; None if there is none.
    """

    chunks: int
    last: Delivery | None


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
    client: QuireClient,
    plan: FollowPlan,
    shard: int,
    *,
    first: int,
    target: Target,
    urgency: Urgency,
    on_begin: Callable[[Delivery], bool],
) -> Followed:
    """Receive a prefix while it is stored, and return when its last part is on the way.

    Args:
        client: Of Quire.
        plan: Names the prefix.
        shard: Of the engine.
        first: First chunk to receive.
        target: Memory for the chunks from there on.
        urgency: When they are needed.
        on_begin: Called with each delivery; returns False for a load that was given up.

    Raises:
        QuireError: A look-up failed, or a delivery was refused.
    """
    namespace, keys, at = plan.namespaces[shard], plan.keys[shard], first
    until_s, part_s, is_active = time.monotonic() + plan.wait_s, _PART_S, True

    def note(delivery: Delivery) -> None:
        nonlocal is_active
        is_active = on_begin(delivery)

    while True:
        left_s = max(0.0, until_s - time.monotonic())
        retrieval = await client.retrieve(
            namespace,
            keys,
            target.buffer,
            first_chunk=at,
            places=target.behind(at - first),
            order=DeliveryOrder.LAYERWISE,
            urgency=urgency,
            lease_ttl_ms=0,
            follow_s=min(part_s, left_s),
            on_begin=note,
        )
        reached, delivery = max(at, retrieval.found.matched_chunks), retrieval.delivery
        if reached == len(keys) or left_s <= part_s or not is_active:
            return Followed(chunks=reached, last=delivery)
        if delivery is None:
            part_s = min(_PART_S_MAX, 2 * part_s)
        elif await _has_come(delivery):
            at, part_s = reached, _PART_S
        else:
            return Followed(chunks=at, last=None)


async def _has_come(delivery: Delivery) -> bool:
    """Wait until a delivery has ended, and no node writes to its memory; return whether all of it came."""
    try:
        await delivery.arrival(delivery.num_layers - 1)
        is_whole = True
    except QuireError as error:
        logger().warning("a load lost chunks; their blocks are computed", error=error.code(), message=str(error))
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
