"""Spans, measurements and log lines of Quire, and every name of theirs in `names.py`. Set-up is the process's own."""

from quire.telemetry.api import counter, logger, meter, tally, tracer
from quire.telemetry.trace import background, be_background, binary_context, entry, from_binary, headers, within

__all__ = [
    "background",
    "be_background",
    "binary_context",
    "counter",
    "entry",
    "from_binary",
    "headers",
    "logger",
    "meter",
    "tally",
    "tracer",
    "within",
]
