"""Requests of a bare session: the client is the test."""

from __future__ import annotations

import asyncio

from quire.wire.v1 import gateway_pb2 as pb
from tests.unit.gateway.rig import recording_session


async def test_a_request_that_is_cancelled_before_it_begins_is_stopped() -> None:
    """The request and its cancellation may arrive together. The client waits for the last answer of the request."""
    session, requests = recording_session()
    stream = session.attach(0)
    session.take(pb.SessionRequest(id=1))
    session.take(pb.SessionRequest(id=2, cancel=1))
    while session.requests:
        await asyncio.sleep(0)
    stream.end()
    (last,) = [response async for response in session.responses(stream)]
    assert (last.id, last.last, last.HasField("stopped"), requests) == (1, True, True, [])


async def test_a_session_that_has_said_its_last_word_takes_no_request() -> None:
    """Finding D8: a fetch behind it ran here and at the gateway that the client asked next, into one buffer."""
    session, taken = recording_session()
    stream = session.attach(0)
    session.take(pb.SessionRequest(id=1))
    session.leave()
    session.take(pb.SessionRequest(id=2))  # it left before the request before it had ended
    while session.requests:
        await asyncio.sleep(0)
    last = [response.heard for response in stream.news][-1]
    session.take(pb.SessionRequest(id=3))
    await asyncio.sleep(0)
    assert (last, session.heard, taken) == (2, 2, [1, 2])
    reattached = session.attach(0)
    session.take(pb.SessionRequest(id=3))
    await asyncio.sleep(0)
    assert taken == [1, 2] and all(response.heard == 2 for response in reattached.news)
