"""Look-up, lease and delivery in one exchange, as the client sees it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from quire.client.delivery import Delivery
from quire.client.lookup import Lookup
from quire.model.errors import InvalidRequest, PeerLost
from quire.model.ranges import clip
from quire.wire.v1 import gateway_pb2 as pb


@dataclass(frozen=True, slots=True)
class Retrieval:
    """A match, and its delivery; None if no chunk is to be delivered.

    Slices are placed as if all requested chunks were delivered: layer l of the i-th chunk at `l * stride + i *
    slice_bytes`, `stride` for all requested chunks.
    """

    found: Lookup
    delivery: Delivery | None


async def retrieved(
    answers: AsyncGenerator[Any, None],
    delivery: Delivery,
    first_chunk: int,
    read: Callable[[pb.LookupResponse], Lookup],
    lookup: asyncio.Future[Lookup],
) -> AsyncGenerator[pb.FetchResponse | pb.SessionStopped, None]:
    """Yield the gateway's answers as those to a fetch. After the first one, which names the nodes, `lookup` is done."""
    async with contextlib.aclosing(answers):
        async for answer in answers:
            if isinstance(answer, pb.SessionStopped):
                yield answer
                return
            if answer.WhichOneof("event") == "delivery":
                yield answer.delivery
                continue
            response = read(answer.found)
            if response.take_chunks > first_chunk:
                with contextlib.suppress(PeerLost):  # such a node's delivery ends by what the gateway says of it
                    delivery.place(clip(response.ranges, first_chunk, response.take_chunks), response.addresses)
            else:
                delivery.nothing_comes()
            if not lookup.done():
                lookup.set_result(response)


def follow_ms(follow_s: float, timeout_s: float) -> int:
    """Return the time for which a request follows stores, at most half of the time until its deadline.

    Raises `InvalidRequest` for a negative or infinite time.
    """
    if not 0 <= follow_s < math.inf:
        raise InvalidRequest(f"{follow_s} is no time", field="follow_s")
    return math.ceil(1000 * min(follow_s, timeout_s / 2))


async def first_of(lookup: asyncio.Future[Lookup], delivery: Delivery, first_chunk: int) -> Retrieval:
    """Wait for the first answer.

    One who stops waiting gives up the delivery. Raises the error of a delivery that ended earlier.
    """
    summary = asyncio.ensure_future(delivery.summary())
    summary.add_done_callback(lambda task: task.cancelled() or task.exception())
    either: list[asyncio.Future[Any]] = [lookup, summary]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        delivery.abandon()
        raise
    if not lookup.done():
        await summary
    result = lookup.result()
    return Retrieval(result, delivery if result.take_chunks > first_chunk else None)
