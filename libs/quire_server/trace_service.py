"""What a member tells of the spans that it keeps in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from quire.model.errors import Unauthenticated
from quire.wire.credentials import AUTHORIZATION, bearer, is_member
from quire.wire.v1 import trace_pb2 as pb
from quire.wire.v1.trace_pb2_grpc import TraceServiceServicer
from quire_server.telemetry.recent_spans import recent_spans

NAME: Final = "quire.v1.TraceService"
_PAGE: Final = 500


class TraceServicer(TraceServiceServicer):
    """For members and operators alone, at whatever address: they show that they know one of `secrets`."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        self._secrets = [secret.decode() for secret in secrets]

    async def ListSpans(self, request: pb.ListSpansRequest, context: Any) -> AsyncIterator[pb.ListSpansResponse]:
        metadata = context.invocation_metadata() or ()
        header = next((str(value) for key, value in metadata if key == AUTHORIZATION), "")
        if not is_member(bearer(header), *self._secrets):
            raise Unauthenticated("spans are told to those who know the cluster's secret", field=AUTHORIZATION)
        spans = recent_spans.of(request.trace_id)
        for first in range(0, len(spans), _PAGE):
            yield pb.ListSpansResponse(spans=spans[first : first + _PAGE])
