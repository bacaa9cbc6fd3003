"""What tracing costs a delivery: off, one request in a hundred, every request.

Three clusters, each with an engine in a process of its own that runs as its environment says, take turns: a round of
one, a round of the next. Spans go by OTLP to a receiver in this process, so that exporting them is paid for, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from rich.progress import track

from quire.client import AsyncClient
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability
from quire.model.hashing import Namespace, block_keys
from quire.model.layout import Dtype, KvLayout
from quire.telemetry import tracer
from quire_server.telemetry import configure
from quire_tools.local import LocalCluster
from quire_tools.otlp_sink import OtlpSink
from quire_tools.report import Report, Row, median, spread

_LAYOUT: Final = KvLayout(16, 16, 8, 128, Dtype.BF16)
_CHUNKS: Final = 64
_MODES: Final = {"off": None, "1%": "0.01", "100%": "1.0"}


def run(rounds: int, deliveries: int) -> Report:
    """`deliveries`: of 64 MiB, in a round."""
    report = Report("tracing", {"name": "the same deliveries, tracing off, same run", "unit": "GB/s"}, tall=True)
    payload = _LAYOUT.payload_bytes(_CHUNKS) * deliveries
    seconds: dict[str, list[float]] = {mode: [] for mode in _MODES}
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(OtlpSink())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = {mode: stack.enter_context(_engine(folder / mode, share, sink)) for mode, share in _MODES.items()}
        for number in track(range(rounds + 1), "rounds", transient=True):
            for mode in sorted(engines, key=lambda _: np.random.random()):
                spent_s = _round(engines[mode], deliveries)
                if number:
                    seconds[mode].append(spent_s)
    rates = {mode: [payload / each / 1e9 for each in times] for mode, times in seconds.items()}
    off = median(rates["off"])
    for mode, each in rates.items():
        paired = median([mine / base for mine, base in zip(each, rates["off"], strict=True)])
        measured = {"GB/s": median(each), "spread": spread(each), "cost, %": (1 - paired) * 100}
        report.rows.append(Row({"traced": mode}, measured, off, paired))
    report.notes.append(f"{sum(sink.spans.values())} spans were received, of {', '.join(sorted(sink.spans))}")
    return report


@contextlib.contextmanager
def _engine(folder: Path, share: str | None, sink: OtlpSink) -> Iterator[subprocess.Popen[str]]:
    """A cluster, and the process that fetches from it."""
    environment = {}
    if share is not None:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": sink.endpoint,
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": share,
        }
    settings = {**environment, "QUIRE_STORAGE_DRIVES": "", "QUIRE_STORAGE_OBJECT_URL": ""}
    with LocalCluster(folder, arena_bytes=192 << 20, settings=settings) as cluster:
        engine = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, cluster.gateway_address],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield engine
        finally:
            engine.kill()
            engine.wait()


def _round(engine: subprocess.Popen[str], deliveries: int) -> float:
    assert engine.stdin is not None and engine.stdout is not None
    engine.stdin.write(f"{deliveries}\n")
    engine.stdin.flush()
    return float(engine.stdout.readline())


async def _serve(gateway: str) -> None:
    """The engine: a line in with how many deliveries, a line out with the seconds that they took."""
    configure("engine")
    namespace = Namespace("bench tracing", "1", _LAYOUT)
    keys = block_keys(namespace, list(range(_CHUNKS * _LAYOUT.chunk_tokens)))
    async with AsyncClient(gateway) as client:
        buffer = client.allocate(_LAYOUT.payload_bytes(_CHUNKS))
        session = await client.store(namespace, keys, 0, buffer, durability=Durability.MEMORY)
        for layer in range(_LAYOUT.num_layers):
            session.layer_ready(layer)
        await session.commit()
        await session.quiesced(10)
        while line := await asyncio.to_thread(sys.stdin.readline):
            started = time.perf_counter()
            for _ in range(int(line)):
                with tracer().start_as_current_span("engine.request"):
                    found = await client.lookup(namespace, keys)
                    delivery = await client.fetch(found, buffer, order=DeliveryOrder.LAYERWISE)
                    for layer in range(_LAYOUT.num_layers):
                        await delivery.layer(layer)
                    await delivery.summary()
                    await delivery.quiesced(10)
                    await client.release(found)
            print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
