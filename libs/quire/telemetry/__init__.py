"""Traces, metrics and logs: set-up, and every name in `names.py`."""

from quire.telemetry.figures import publish
from quire.telemetry.setup import configure, counter, logger, meter, tracer
from quire.telemetry.trace import attach, background, be_background, binary_context, from_binary, headers

__all__ = [
    "attach",
    "background",
    "be_background",
    "binary_context",
    "configure",
    "counter",
    "from_binary",
    "headers",
    "logger",
    "meter",
    "publish",
    "tracer",
]
