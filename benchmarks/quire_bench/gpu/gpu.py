"""`quire bench gpu`: delivery into a GPU's memory, its overlap with compute, logits, decoding. Checks as it goes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer

from quire.client import Client
from quire_tools.local import LocalCluster
from quire_tools.report import Report

_SETTINGS = {"QUIRE_STORAGE_DRIVES": "", "QUIRE_STORAGE_OBJECT_URL": ""}


def run(name: str, mib: int, layers: int, sizes: list[int], engines: list[str], rounds: int) -> Report:
    """Raises `ConfigInvalid` for a device that is not there, `InternalError` for a wrong byte or logit."""
    from quire_bench.gpu import decode, delivery, logits
    from quire_bench.gpu.device import Device

    os.environ["QUIRE_SHARED_MEMORY"] = "off"
    device = Device(name)
    baseline = "delivery: the bare copy from pinned memory; overlap: one after the other; decode: eager, same dtype"
    report = Report("gpu", {"name": baseline, "unit": "ms"}, tall=True)
    report.notes.append(f"device: {device.description}; torch {torch.__version__}; {mib} MiB in {layers} layers")
    dtypes = ["float16", "bfloat16"] if device.is_cuda else ["float32"]
    with tempfile.TemporaryDirectory(prefix="quire-gpu-") as folder:
        cluster = LocalCluster(Path(folder) / "cluster", arena_bytes=max(256, 2 * mib) << 20, settings=_SETTINGS)
        with cluster, Client(cluster.gateway_address) as client:
            deliveries = delivery.Deliveries(client, device, mib, layers)
            report.rows += delivery.measure(deliveries, device, rounds)
            report.notes += deliveries.notes
            report.rows += [logits.compare(client, device, dtype) for dtype in (torch.float32, torch.bfloat16)]
        rows, notes = decode.measure(Path(folder) / "vae", device, sizes, engines, dtypes, rounds)
        report.rows += rows
        report.notes += notes
    report.notes.append("every byte that was delivered was compared, and every logit, bit by bit")
    return report


def command(
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto for the better one")] = "auto",
    mib: Annotated[int, typer.Option(help="of the delivered prefix")] = 512,
    layers: Annotated[int, typer.Option(help="layers of the model")] = 32,
    sizes: Annotated[str, typer.Option(help="of decoded pictures, pixels")] = "512,1024",
    engines: Annotated[str, typer.Option(help="one or several")] = "eager,channels_last,compile,graphs",
    rounds: Annotated[int, typer.Option(help="rounds of each measurement")] = 7,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw the result there (PNG)")] = None,
) -> None:
    """Delivery into a GPU's memory, layerwise overlap, bit-identical logits, decoding by engine and dtype."""
    found = run(device, mib, layers, [int(size) for size in sizes.split(",")], engines.split(","), rounds)
    found.show(json_file, plot)
