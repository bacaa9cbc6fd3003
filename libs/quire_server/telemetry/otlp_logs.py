"""Log records for a collector, by OTLP, at `OTEL_EXPORTER_OTLP_ENDPOINT`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.resources import Resource


class OtlpLog:
    """Sends in the background, in batches; records that no collector takes are lost."""

    def __init__(self, service: str, name: str, *, node_id: str = "") -> None:
        """Start sending.

        Args:
            service: For `service.name`.
            name: Of the log, for the scope of its records.
            node_id: For `service.instance.id`.
        """
        resource = Resource.create({"service.name": service, "service.instance.id": node_id or service})
        self._provider = LoggerProvider(resource=resource)
        self._provider.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter()))
        self._logger = self._provider.get_logger(name)

    def write(self, record: Mapping[str, str | int | bool], *, at_ms: int, warns: bool) -> None:
        """Send a record: its JSON is the body, its parts are attributes.

        Args:
            record: Names and values.
            at_ms: Time, Unix epoch.
            warns: Whether its severity is WARN, not INFO.
        """
        severity = SeverityNumber.WARN if warns else SeverityNumber.INFO
        self._logger.emit(
            LogRecord(
                timestamp=at_ms * 1_000_000,
                severity_number=severity,
                severity_text=severity.name,
                body=json.dumps(record),
                attributes=dict(record),
            )
        )

    def close(self) -> None:
        """Send the rest."""
        self._provider.shutdown()
