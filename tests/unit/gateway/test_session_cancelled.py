"""A session's request that is cancelled in the moment in which it arrives."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from quire.testing import FakeClock
from quire.wire.v1 import gateway_pb2 as pb
from quire_gateway.grpc.session import Session


async def test_a_request_that_is_cancelled_before_it_begins_is_stopped() -> None:
    """Both come in one message of the transport: the client waited for its last answer until its deadline."""
    begun = list[int]()

    async def answer(session: Session, message: pb.SessionRequest) -> None:
        begun.append(message.id)

    async def release(lease: bytes) -> None: ...

    session = Session(cast(Any, None), answer, release, FakeClock())
    stream = session.attach(0)
    session.take(pb.SessionRequest(id=1))
    session.take(pb.SessionRequest(id=2, cancel=1))
    while session.requests:
        await asyncio.sleep(0)
    stream.end()
    (last,) = [response async for response in session.responses(stream)]
    assert (last.id, last.last, last.HasField("stopped"), begun) == (1, True, True, [])
