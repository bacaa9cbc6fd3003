"""`quire trace`: a request's way through the services, as a waterfall in the terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from quire.client import AdminClient
from quire.model.errors import InvalidRequest, Unavailable
from quire.telemetry import be_background
from quire_server.config import value_of
from quire_tools.cli.cluster import as_operator
from quire_tools.spans import Span, Trace, lines_of, read_traces

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")
_BAR_MIN = 24
console = Console()
warnings = Console(stderr=True, style="yellow", markup=False)


def of_folder(folder: Path) -> dict[str, Trace]:
    """Read the traces of a folder. Raises `InvalidRequest` if there are none."""
    traces = read_traces(lines_of(folder))
    if not traces:
        raise InvalidRequest(f"no traces in {folder}; `quire up --trace` writes some", field="folder")
    return traces


def of_cluster(admin: str, trace_id: str) -> dict[str, Trace]:
    """Read the traces that the members of a cluster keep. Raises `InvalidRequest` if there are none."""
    if not value_of("QUIRE_CLUSTER_SECRET", os.environ):
        raise InvalidRequest("must be set: operators know the cluster's secret", field="QUIRE_CLUSTER_SECRET")
    lines: list[bytes] = []

    async def collect(operator: AdminClient) -> None:
        be_background()  # looking at traces makes none
        try:
            async for answer in operator.spans(trace_id):
                lines.extend(answer.spans)
                if answer.error:
                    warnings.print(f"! spans of {answer.member} are missing: {answer.error}")
        except Unavailable as error:
            if not lines:
                raise
            warnings.print(f"! not all members were asked: {error}")

    as_operator(Path(), admin, collect)
    traces = read_traces(lines)
    if not traces and trace_id:
        raise InvalidRequest(f"no trace whose id begins with {trace_id!r} is kept at {admin}", field="id")
    if not traces:
        raise InvalidRequest(f"no traces at {admin}; QUIRE_TRACE_RECENT=4000 at each service keeps some", field="admin")
    return traces


def show(traces: Mapping[str, Trace], trace_id: str, limit: int, *, as_json: bool) -> None:
    """Show one trace; without an id the latest ones. Raises `InvalidRequest` for an unknown one."""
    if not trace_id:
        _list(sorted(traces.values(), key=lambda trace: trace.start_ns)[-limit:], as_json=as_json)
        return
    matches = [trace for trace in traces.values() if trace.trace_id.startswith(trace_id.lower())]
    if len(matches) != 1:
        raise InvalidRequest(f"{len(matches)} traces begin with {trace_id!r}", field="id")
    if as_json:
        print(json.dumps([{"depth": depth, **asdict(span)} for depth, span in matches[0].walk()], indent=2))
    else:
        _waterfall(matches[0])


def _list(traces: Sequence[Trace], *, as_json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {
            "trace": trace.trace_id,
            "began_with": trace.roots[0].name,
            "services": sorted({span.service for span in trace.spans.values()}),
            "spans": len(trace.spans),
            "ms": (trace.end_ns - trace.start_ns) / 1e6,
        }
        for trace in traces
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("trace", "began with", "services", "spans", "ms")
    for trace_id, began_with, services, spans, ms in (row.values() for row in rows):
        table.add_row(trace_id, began_with, ", ".join(services), str(spans), f"{ms:.1f}")
    console.print(table)


def _waterfall(trace: Trace) -> None:
    services = sorted({span.service for span in trace.spans.values()})
    colour = {service: _COLOURS[index % len(_COLOURS)] for index, service in enumerate(services)}
    names = {span.span_id: "  " * depth + span.name.removeprefix("quire.v1.") for depth, span in trace.walk()}
    margin = min(52, max(map(len, names.values())))
    width = max(_BAR_MIN, console.width - margin - 26)
    total_ns = max(1, trace.end_ns - trace.start_ns)
    legend = Text.assemble(*((f" {service} ", f"reverse {colour[service]}") for service in services))
    console.print(f"trace {trace.trace_id}: {len(trace.spans)} spans, {total_ns / 1e6:.2f} ms  ", legend)
    for _, span in trace.walk():
        line = Text(f"{names[span.span_id][:margin]:<{margin}} ", style="" if span.ok else "bold red")
        line.append(_bar(span, trace.start_ns, total_ns, width), style=colour[span.service])
        line.append(f" {(span.end_ns - span.start_ns) / 1e6:9.2f} ms", style="dim")
        if stages := _stages(span):
            line.append(f"  {stages}", style="dim")
        console.print(line, no_wrap=True, overflow="ellipsis", soft_wrap=False)


def _bar(span: Span, start_ns: int, total_ns: int, width: int) -> str:
    """`│` marks an event: a layer that arrived."""
    first = int((span.start_ns - start_ns) / total_ns * width)
    last = max(first + 1, round((span.end_ns - start_ns) / total_ns * width))
    cells = [" "] * first + ["━"] * (last - first) + [" "] * (width - last)
    for at_ns, _, _ in span.events:
        cells[min(width - 1, int((at_ns - start_ns) / total_ns * width))] = "┃"
    return "".join(cells[:width])


def _stages(span: Span) -> str:
    """Return the parts of a layer's time."""
    layer = span.attributes.get("quire.layer")
    spent = {name[6:-3]: value for name, value in span.attributes.items() if name.endswith("_us") and value}
    text = " ".join(f"{name} {value / 1e3:.1f}" for name, value in spent.items())
    return f"#{layer} {text}" if layer is not None else text
