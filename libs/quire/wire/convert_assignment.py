"""Conversion between assignments and messages."""

from __future__ import annotations

import numpy as np

from quire.model.assignment import TOKENS_MAX, Assignment, EngineTable
from quire.model.errors import InvalidRequest
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.wire import convert
from quire.wire.v1 import gateway_pb2 as pb


def assign_request_to(
    namespace: Namespace, keys: ChunkKeys, prompt_tokens: int, engines: EngineTable
) -> pb.AssignRequest:
    """Return the message. Raises `InvalidRequest` for a length that no prompt has."""
    if not 0 < prompt_tokens <= TOKENS_MAX:
        raise InvalidRequest(f"{prompt_tokens} is not in 1..{TOKENS_MAX}", field="prompt_tokens")
    return pb.AssignRequest(
        namespace=convert.namespace_to(namespace),
        chunk_keys=keys.packed,
        prompt_tokens=prompt_tokens,
        engines=engines.names,
        hosts=engines.hosts,
        cached_tokens=engines.cached_tokens.tolist(),
        queued_tokens=engines.queued_tokens.tolist(),
        tokens_per_s=engines.tokens_per_s.tolist(),
    )


def engines_from(message: pb.AssignRequest) -> EngineTable:
    """Check and convert. Raises `InvalidRequest`."""
    return EngineTable(
        names=list(message.engines),
        hosts=list(message.hosts),
        cached_tokens=np.array(message.cached_tokens, dtype=np.int64),
        queued_tokens=np.array(message.queued_tokens, dtype=np.int64),
        tokens_per_s=np.array(message.tokens_per_s, dtype=np.float64),
    )


def assignment_to(assignment: Assignment) -> pb.AssignResponse:
    """Return the message."""
    times_us = [round(seconds * 1e6) for seconds in assignment.ttft_s]
    return pb.AssignResponse(engine=assignment.engine, take_chunks=assignment.take_chunks, ttft_us=times_us)


def assignment_from(message: pb.AssignResponse) -> Assignment:
    """The inverse of `assignment_to`."""
    return Assignment(message.engine, message.take_chunks, tuple(us / 1e6 for us in message.ttft_us))
