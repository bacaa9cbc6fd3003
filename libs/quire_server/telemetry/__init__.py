"""Telemetry of a process: exporters, the log's format, and the listener for metrics."""

from quire_server.telemetry.figures import publish
from quire_server.telemetry.setup import configure

__all__ = ["configure", "publish"]
