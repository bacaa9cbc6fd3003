"""Times of a delivery, layer by layer, for its trace."""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry import trace

from quire.telemetry import names, tracer
from quire_storage.ports import Clock


class LayerTrace:
    """Records a span per layer, with the waits of its bytes.

    They wait to be `ready` (read, verified), for their rate (`pace`), for their `turn` on the wire, and until UCX took
    them (`write`). It ends when they have arrived.

    Costs a comparison where the delivery is not recorded.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._span: trace.Span | None = None
        self._at_s = 0.0
        self._spent_s: dict[str, float] = {}

    def begin(self, delivery: trace.Span, layer: int) -> None:
        """The first of a layer's bytes is wanted."""
        if delivery.is_recording():
            self._span = tracer().start_span(names.STORAGE_LAYER, attributes={"quire.layer": layer})
            self._at_s, self._spent_s = self._clock.monotonic_s(), {}

    def passed(self, stage: str) -> None:
        """Count the time since the last call as a wait for `stage`."""
        if self._span is not None:
            now_s = self._clock.monotonic_s()
            self._spent_s[stage] = self._spent_s.get(stage, 0.0) + now_s - self._at_s
            self._at_s = now_s

    def fail(self) -> None:
        """The delivery ends before the layer has left."""
        if self._span is not None:
            self._span.set_status(trace.Status(trace.StatusCode.ERROR))
            self._span.end()
            self._span = None

    def end(self) -> Callable[[], None] | None:
        """The last of the layer's bytes is on its way; what to call when it is there, if anything."""
        span, self._span = self._span, None
        if span is None:
            return None
        span.set_attributes({f"quire.{stage}_us": int(spent * 1e6) for stage, spent in self._spent_s.items()})
        return span.end
