"""Telemetry of a process: exporters, the log's format, and the listener for metrics."""

from quire_server.telemetry.setup import configure
from quire_server.telemetry.stats import publish

__all__ = ["configure", "publish"]
