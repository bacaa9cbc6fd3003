"""Traces, metrics and logs: set-up, and every name in `names.py`."""

from quire.telemetry.setup import configure, logger, meter, tracer
from quire.telemetry.trace import attach, binary_context, from_binary, headers

__all__ = ["attach", "binary_context", "configure", "from_binary", "headers", "logger", "meter", "tracer"]
