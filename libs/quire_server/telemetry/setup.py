"""Set-up of OpenTelemetry and structlog, once per process.

`OTEL_EXPORTER_OTLP_ENDPOINT` sends traces to a collector; metrics are scraped (`metrics_listener`).
`QUIRE_TRACE_FOLDER` also appends each finished span to a file there as one JSON line, for machines without a collector.
`keep_spans` has the last ones in memory. With none of these, spans are not recorded.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any, Final

import structlog
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)

from quire.telemetry.trace import in_request
from quire_server.telemetry.log_dedup import LogDedup
from quire_server.telemetry.recent_spans import recent_spans, record_of

_SECRET_WORDS: Final = ("secret", "password", "token", "authorization", "signature", "lease", "credential")
repeats: Final = LogDedup()
_URL_PASSWORD: Final = re.compile(r"(\w+://[^\s/:@]*:)[^\s/@]+@")


class FileSpanExporter(SpanExporter):
    """Writes one JSON object per finished span and line; times in Unix nanoseconds."""

    def __init__(self, path: Path, service: str) -> None:
        self._file = path.open("a", buffering=1)
        self._service = service

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            self._file.write(json.dumps(record_of(span, self._service)) + "\n")
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()


def configure(service: str, *, node_id: str = "", log_level: str = "info", metrics_too: bool = False) -> None:
    """Install exporters and log format for this process; with `metrics_too` also what `metrics_listener` serves."""
    _configure_logs(service, log_level)
    if metrics_too:
        _take_libraries_logs(service)
    # A stream whose client disconnected is closed from another context; the stack trace that it logs is harmless.
    logging.getLogger("opentelemetry.context").setLevel(logging.CRITICAL)
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    folder = os.environ.get("QUIRE_TRACE_FOLDER")
    resource = Resource.create({"service.name": service, "service.instance.id": node_id or service})
    readers: list[MetricReader] = []
    if metrics_too:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader

        readers.append(PrometheusMetricReader(scope_info_enabled=False))
    if readers:
        metrics.set_meter_provider(MeterProvider(resource=resource, metric_readers=readers))
    if not endpoint and not folder:
        return
    # OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG say how many requests are traced.
    provider = TracerProvider(resource=resource)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"{service}-{os.getpid()}.jsonl"
        provider.add_span_processor(SimpleSpanProcessor(FileSpanExporter(path, service)))
    if endpoint:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def keep_spans(service: str, limit: int) -> None:
    """Keep the last spans in memory, whether or not they are exported; 0 for none."""
    if not limit:
        return
    recent_spans.keep(service, limit)
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    provider.add_span_processor(recent_spans)


def _configure_logs(service: str, level: str) -> None:
    def add_trace(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if in_request():
            context = trace.get_current_span().get_span_context()
            event["trace_id"] = f"{context.trace_id:032x}"
        return event

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            add_trace,
            structlog.processors.format_exc_info,
            _without_secrets,
            repeats,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(service=service)


def _take_libraries_logs(service: str) -> None:
    """Libraries' lines, warnings and what nothing catches become lines of the same form."""

    def add_service(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["service"] = service
        return event

    formatter = structlog.stdlib.ProcessorFormatter
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        formatter(
            foreign_pre_chain=[
                structlog.stdlib.add_logger_name,
                structlog.stdlib.ExtraAdder(),
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso"),
                add_service,
                structlog.processors.format_exc_info,
                _without_secrets,
            ],
            processors=[formatter.remove_processors_meta, structlog.processors.JSONRenderer()],
        )
    )
    handler.addFilter(_NotRepeated())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    sys.excepthook = lambda kind, error, where: structlog.get_logger().critical(
        "an exception that nothing caught", exc_info=(kind, error, where)
    )


class _NotRepeated(logging.Filter):
    """Libraries repeat themselves, too."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            repeats(None, "", {"event": record.getMessage(), "level": record.levelname.lower(), "logger": record.name})
        except structlog.DropEvent:
            return False
        return True


def _without_secrets(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Hide values that are named like a secret, and passwords in URLs."""
    for name, value in event.items():
        if any(word in name.lower() for word in _SECRET_WORDS):
            event[name] = "***"
        elif isinstance(value, str):
            event[name] = _URL_PASSWORD.sub(r"\1***@", value)
    return event
