"""One trace per request: whole, with every service in it, and with the time that it took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire.model.errors import Unauthenticated
from quire.telemetry import names
from quire.wire.channels import ChannelPool, stream
from quire.wire.v1 import trace_pb2
from quire.wire.v1.trace_pb2_grpc import TraceServiceStub
from quire_decoder.adapters.weights import weights_digest
from quire_tools.local import LocalCluster
from quire_tools.otlp_sink import OtlpSink
from quire_tools.spans import Span, Trace, lines_of, read_traces
from tests import fork_server
from tests.e2e import traced_client

# The whole payload takes some 2.5 s at this rate: long against what is not the data plane's, on a slow machine too.
LINK_BYTES_PER_S = 25_000_000
LAYERS = 16
# Between two readings of one machine's clock.
CLOCK_NS = 200_000
_STILL_S = 60.0
"""After which nothing more is expected where nothing has come."""


@dataclass(frozen=True)
class Traced:
    traces: dict[str, Trace]
    wall_s: dict[str, float]
    folder: Path
    ids: dict[str, str]
    cluster: LocalCluster


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, vae: Path) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traced")
    settings = {
        "QUIRE_DECODER_MODELS": str(vae),
        "QUIRE_SCHEDULER_LINKS": f"default={LINK_BYTES_PER_S}",
        "QUIRE_SCHEDULER_POLICY": "equal",
        "QUIRE_DECODER_CACHE_BYTES": "0",  # every image is cold
        "QUIRE_GATEWAY_IMAGES_KEPT_BYTES": "0",
    }
    one_of_each = LocalCluster(
        folder, decoders=1, storage_nodes=2, arena_bytes=128 << 20, settings=settings, trace=True
    )
    with one_of_each as cluster:
        environment = {**os.environ, "QUIRE_TRACE_FOLDER": str(folder / "traces"), "PYTHONPATH": "."}
        command = [sys.executable, "-m", traced_client.__name__, cluster.gateway_address, weights_digest(vae)]
        done = fork_server.run(command, env=environment, timeout=300, kind="torch")
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        ids, wall_s = told["ids"], told["wall_s"]
        traces = _settled(folder / "traces", list(ids.values()))
        whole = {name: traces[trace_id] for name, trace_id in ids.items()}
        yield Traced(whole, wall_s, folder / "traces", ids, cluster)


def _settled(folder: Path, ids: list[str]) -> dict[str, Trace]:
    """Servers write their spans when they have answered: read until nothing more comes, and no parent is missing."""
    since_s, known_spans = time.monotonic(), -1
    while time.monotonic() - since_s < _STILL_S:
        traces = read_traces(lines_of(folder))
        count = sum(len(traces[each].spans) for each in ids if each in traces)
        if count == known_spans and all(each in traces and len(traces[each].roots) == 1 for each in ids):
            return traces
        since_s, known_spans = time.monotonic() if count != known_spans else since_s, count
        time.sleep(0.3)
    return traces


@pytest.mark.parametrize(
    ("request_name", "services"),
    [
        # The gateway looks up, leases and gives back by itself.
        ("kv", {"engine", "gateway", "scheduler", "storage"}),
        ("store", {"engine", "gateway", "orchestrator", "storage"}),
        # A record goes chunkwise, which asks no scheduler.
        ("image", {"engine", "gateway", "orchestrator", "decoder", "storage"}),
    ],
)
def test_one_root_no_orphan_every_service(traced: Traced, request_name: str, services: set[str]) -> None:
    trace = traced.traces[request_name]
    assert [root.service for root in trace.roots] == ["engine"], [root.name for root in trace.roots]
    assert trace.roots[0].parent_id is None
    assert {span.service for span in trace.spans.values()} == services
    assert all(span.ok for span in trace.spans.values()), [span.name for span in trace.spans.values() if not span.ok]


@pytest.mark.parametrize("request_name", ["kv", "store", "image"])
def test_children_begin_inside_their_parents(traced: Traced, request_name: str) -> None:
    """And end there too in the same process. A server may note the end of an answer that its client has already."""
    trace = traced.traces[request_name]
    outside = []
    for span in trace.spans.values():
        for child in trace.children(span.span_id):
            begins = span.start_ns - CLOCK_NS <= child.start_ns <= span.end_ns + CLOCK_NS
            ends = child.end_ns <= span.end_ns + CLOCK_NS or child.service != span.service
            if not (begins and ends):
                outside.append((child.name, span.name, (child.end_ns - span.end_ns) / 1e6))
    assert not outside


def test_the_data_planes_time_is_accounted_for(traced: Traced) -> None:
    """The stages of the nodes' deliveries cover four fifths of a fetch's wall time, in one of two fetches. The rest is
    the client's, which competes with other work on this machine.
    """
    stages = {
        names.STORAGE_HOLD,
        names.STORAGE_ADMIT,
        names.STORAGE_READ,
        names.STORAGE_LAYER,
        names.STORAGE_DRAIN,
        names.STORAGE_QUIESCE,
    }
    covered = []
    for name, wall_s in traced.wall_s.items():
        trace = traced.traces[name]
        fetch = next(span for span in trace.spans.values() if span.name == names.CLIENT_FETCH)
        assert (fetch.end_ns - fetch.start_ns) / 1e9 == pytest.approx(wall_s, rel=0.2)
        covered.append(_union_s(trace, lambda span: span.name in stages) / wall_s)
    assert max(covered) >= 0.8 and all(each <= 1.001 for each in covered), covered


def _union_s(trace: Trace, wanted: Callable[[Span], bool]) -> float:
    covered_ns, until_ns = 0, 0
    for span in sorted(filter(wanted, trace.spans.values()), key=lambda each: each.start_ns):
        covered_ns += max(0, span.end_ns - max(span.start_ns, until_ns))
        until_ns = max(until_ns, span.end_ns)
    return covered_ns / 1e9


def test_layers_are_seen_at_both_ends(traced: Traced) -> None:
    """Each node writes each layer, and says where its time went; the client sees each arrive."""
    trace = traced.traces["kv"]
    layers = [span for span in trace.spans.values() if span.name == names.STORAGE_LAYER]
    nodes = sum(span.name == names.STORAGE_DELIVER for span in trace.spans.values())
    assert len(layers) == nodes * LAYERS
    assert {span.attributes["quire.layer"] for span in layers} == set(range(LAYERS))
    assert all(span.attributes["quire.write_us"] >= 0 for span in layers)
    fetch = next(span for span in trace.spans.values() if span.name == names.CLIENT_FETCH)
    assert len([event for event in fetch.events if event[1] == names.EVENT_LAYER]) == LAYERS


def test_a_browsers_trace_goes_on_through_http(traced: Traced) -> None:
    """W3C's header names the trace that the gateway, the orchestrator and the decoder join."""
    trace_id, span_id = os.urandom(16).hex(), os.urandom(8).hex()
    request = urllib.request.Request(
        f"http://{traced.cluster.http_address}/v1/images/traced", headers={"traceparent": f"00-{trace_id}-{span_id}-01"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200
    trace = _settled(traced.folder, [trace_id])[trace_id]
    (root,) = trace.roots
    assert (root.name, root.parent_id) == (names.GATEWAY_HTTP, span_id)
    assert {span.service for span in trace.spans.values()} >= {"gateway", "orchestrator", "decoder"}


def test_a_cold_image_takes_few_steps(traced: Traced) -> None:
    """Over HTTP: one look at the catalogue, and no request that another one could have carried."""
    trace_id = os.urandom(16).hex()
    header = {"traceparent": f"00-{trace_id}-{os.urandom(8).hex()}-01"}
    request = urllib.request.Request(f"http://{traced.cluster.http_address}/v1/images/cold", headers=header)
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200 and answer.headers["X-Quire-Source"] == "miss"
    spans = _settled(traced.folder, [trace_id])[trace_id].spans.values()
    by_id = {span.span_id: span for span in spans}
    served = [span for span in spans if span.parent_id in by_id and by_id[span.parent_id].name == span.name]
    asked = sorted(span.name.removeprefix("quire.v1.") for span in served if span.name.startswith("quire.v1."))
    assert len(asked) <= 6, asked
    assert {"DecoderService/Decode", "StorageService/Deliver", "OrchestratorService/RouteImage"} <= set(asked)
    assert sum(span.name == names.CATALOGUE_READ for span in spans) == 1


def test_the_waterfall_in_a_terminal(traced: Traced) -> None:
    """`quire trace` lists traces, and draws one that it is given."""
    environment = {**os.environ, "COLUMNS": "160"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = fork_server.quire("trace", *arguments, "--folder", traced.folder)
        return fork_server.run(command, env=environment, timeout=60)

    listed = run()
    assert listed.returncode == 0 and traced.ids["kv"] in listed.stdout
    drawn = run(traced.ids["kv"])
    assert drawn.returncode == 0, drawn.stderr
    for text in ("engine.request", names.STORAGE_DELIVER, "SchedulerService/Admit", names.INDEX_MATCH, "━"):
        assert text in drawn.stdout, drawn.stdout
    told = json.loads(run("--json").stdout)
    assert traced.ids["kv"] in {each["trace"] for each in told}
    spans = json.loads(run(traced.ids["kv"], "--json").stdout)
    assert spans[0]["depth"] == 0 and names.STORAGE_DELIVER in {each["name"] for each in spans}
    unknown = run("ffff00")
    assert unknown.returncode == 1 and "InvalidRequest" in unknown.stderr


def test_a_trace_of_a_cluster_elsewhere(traced: Traced) -> None:
    """What the services keep in memory is what they wrote to files, but for the engine's spans."""
    kept = _settled(traced.folder, [traced.ids["kv"]])[traced.ids["kv"]]
    spans = [span for span in kept.spans.values() if span.service != "engine"]

    def run(secret: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "COLUMNS": "160", "QUIRE_CLUSTER_SECRET": secret}
        command = fork_server.quire("trace", *arguments, "--admin", traced.cluster.admin_address)
        return fork_server.run(command, env=environment, timeout=60)

    drawn = run(traced.cluster.secret, traced.ids["kv"][:20].upper())
    assert f"trace {traced.ids['kv']}: {len(spans)} spans" in drawn.stdout, drawn
    for text in (names.STORAGE_DELIVER, "SchedulerService/Admit", names.INDEX_MATCH, "━"):
        assert text in drawn.stdout, drawn.stdout
    listed = run(traced.cluster.secret)
    assert listed.returncode == 0 and traced.ids["image"] in listed.stdout
    assert "AdminService" not in listed.stdout and "missing" not in listed.stdout
    stranger = run("x" * 32)
    assert stranger.returncode == 1 and "Unauthenticated" in stranger.stderr
    unknown = run(traced.cluster.secret, "ffff00")
    assert unknown.returncode == 1 and "no trace whose id begins with 'ffff00'" in unknown.stderr
    none = run("")
    assert none.returncode == 1 and "QUIRE_CLUSTER_SECRET" in none.stderr


@pytest.mark.parametrize("token", ["", "wrong"])
async def test_spans_are_told_to_gateways_alone(traced: Traced, token: str) -> None:
    """At any service, though clients reach some of them."""
    for name in set(traced.cluster.names) - {"redis"}:
        channels = ChannelPool(token=token)
        stub: TraceServiceStub = TraceServiceStub(channels.get(traced.cluster.address(name)))
        with pytest.raises(Unauthenticated):
            await anext(stream(stub.ListSpans, trace_pb2.ListSpansRequest(), timeout_s=10))
        await channels.close()


def test_spans_reach_an_otlp_receiver(tmp_path: Path) -> None:
    """By the standard variables alone: every service's spans, in the trace that the engine began."""
    with OtlpSink() as sink:
        export = {"OTEL_EXPORTER_OTLP_ENDPOINT": sink.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        with LocalCluster(tmp_path, arena_bytes=128 << 20, settings=export) as cluster:
            environment = {**os.environ, **export, "PYTHONPATH": "."}
            command = [sys.executable, "-m", traced_client.__name__, cluster.gateway_address]
            done = fork_server.run(command, env=environment, timeout=300, kind="torch")
            assert done.returncode == 0, done.stderr
            trace_id = bytes.fromhex(json.loads(done.stdout)["ids"]["kv"])
            services = {"engine", "gateway", "scheduler", "storage"}
            deadline = time.monotonic() + 120
            while sink.traces.get(trace_id) != services and time.monotonic() < deadline:
                time.sleep(0.1)
    assert sink.traces.get(trace_id) == services
    assert sum(sink.spans.values()) > 40


def test_what_belongs_to_no_request_is_not_traced(traced: Traced) -> None:
    """Heartbeats and renewals go on all the time; a trace viewer full of them would show nothing else."""
    roots = {root.name for trace in read_traces(lines_of(traced.folder)).values() for root in trace.roots}
    assert not {name for name in roots if "Heartbeat" in name or "Renew" in name}, roots
