"""Telemetry of a process: exporters, the log's format, and the listener for metrics."""

from quire_server.telemetry.setup import configure, keep_spans
from quire_server.telemetry.stats import publish

__all__ = ["configure", "keep_spans", "publish"]
