"""An OTLP receiver that counts: for benchmarks and tests, where no collector is at hand."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs_pb
from opentelemetry.proto.collector.logs.v1.logs_service_pb2_grpc import (
    LogsServiceServicer,
    add_LogsServiceServicer_to_server,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class _Logs(LogsServiceServicer):
    def __init__(self) -> None:
        self.records: list[tuple[str, str]] = []
        """service.name and body."""

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_logs:
            names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
            for scope in resource.scope_logs:
                bodies = [record.body.string_value for record in scope.log_records]
                self.records += [(names.get("service.name", ""), body) for body in bodies]
        return logs_pb.ExportLogsServiceResponse()


class OtlpSink(TraceServiceServicer):
    """`with OtlpSink() as sink`: `sink.endpoint` is for OTEL_EXPORTER_OTLP_ENDPOINT."""

    def __init__(self) -> None:
        self.spans: Counter[str] = Counter()
        """By service.name."""
        self.traces: dict[bytes, set[str]] = {}
        """Services by trace id."""
        self.logs = _Logs()

    def __enter__(self) -> OtlpSink:
        self._server = grpc.server(ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call, unused-ignore]
        add_LogsServiceServicer_to_server(self.logs, self._server)  # type: ignore[no-untyped-call, unused-ignore]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.stop(1).wait(5)

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
            service = names.get("service.name", "")
            for scope in resource.scope_spans:
                self.spans[service] += len(scope.spans)
                for span in scope.spans:
                    self.traces.setdefault(span.trace_id, set()).add(service)
        return pb.ExportTraceServiceResponse()
