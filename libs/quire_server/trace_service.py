"""Serves the spans that a member keeps in memory."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from quire.model.errors import Unauthenticated
from quire.wire.credentials import AUTHORIZATION, bearer, spans_token
from quire.wire.v1 import trace_pb2 as pb
from quire.wire.v1.trace_pb2_grpc import TraceServiceServicer
from quire_server.telemetry.recent_spans import recent_spans

NAME: Final = "quire.v1.TraceService"
_PAGE: Final = 200


class TraceServicer(TraceServiceServicer):
    """Serves gateways, which ask on behalf of operators.

    They show a token that is made of one of the cluster's `secrets`.
    """

    def __init__(self, secrets: Sequence[bytes]) -> None:
        self._tokens = [spans_token(secret).encode() for secret in secrets]

    async def ListSpans(self, request: pb.ListSpansRequest, context: Any) -> AsyncIterator[pb.ListSpansResponse]:
        metadata = context.invocation_metadata() or ()
        presented = bearer(next((str(value) for key, value in metadata if key == AUTHORIZATION), "")).encode()
        if not any(hmac.compare_digest(presented, token) for token in self._tokens):
            raise Unauthenticated("spans are served to gateways, which know the cluster's secret", field=AUTHORIZATION)
        spans = recent_spans.kept()
        for first in range(0, len(spans), _PAGE):
            if response := recent_spans.told(spans[first : first + _PAGE], request.trace_id):
                yield pb.ListSpansResponse(spans=response)
            await asyncio.sleep(0)  # the service's other requests have their turn
