"""The commands, in one place; what they do stands in modules of their own."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from quire import __version__
from quire.cli import cluster as cluster_commands
from quire.errors import QuireError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
bench_app = typer.Typer(
    no_args_is_help=True, help="Benchmarks: a table, --json FILE, --plot FILE.png; the baseline is named."
)
app.add_typer(bench_app, name="bench")

Folder = Annotated[Path, typer.Option(help="where the cluster keeps its files")]
Gateway = Annotated[str, typer.Option(help="host:port of a gateway; empty for the cluster on --folder")]
Json = Annotated[Path | None, typer.Option("--json", help="write the result there")]
Plot = Annotated[Path | None, typer.Option("--plot", help="draw the result there (PNG)")]
_FOLDER = Path("quire-data")


@app.command()
def version() -> None:
    """Version of Quire and of the UCX in use."""
    import pyucx

    ucx = ".".join(map(str, pyucx.library.version))
    print(f"quire {__version__}, UCX {ucx} from {pyucx.library.path} ({pyucx.library.origin})")


@app.command()
def up(
    folder: Folder = _FOLDER, storage_nodes: int = 1, arena_mib: int = 1024, drive_mib: int = 4096, trace: bool = False
) -> None:
    """Start a cluster on this machine and keep it running until Ctrl-C."""
    cluster_commands.up(folder, storage_nodes, arena_mib << 20, drive_mib << 20, trace)


@app.command()
def status(folder: Folder = _FOLDER, gateway: Gateway = "") -> None:
    """Who is in the cluster, and what they hold."""
    cluster_commands.status(folder, gateway)


@app.command()
def lookup(
    file: Annotated[Path, typer.Argument(help="text; its bytes are the tokens, as in the demo")],
    namespace: Annotated[Path, typer.Option(help="the namespace, as JSON (the demo writes one)")],
    folder: Folder = _FOLDER,
    gateway: Gateway = "",
) -> None:
    """How much of a text's prefix is cached, and where. No side effect."""
    cluster_commands.lookup(file, namespace, folder, gateway)


@app.command()
def policy(
    namespace: Annotated[Path, typer.Option(help="the namespace, as JSON (the demo writes one)")],
    ttl_s: Annotated[int, typer.Option(help="seconds after which a stored chunk goes; 0 for never")] = 0,
    quota_mib: Annotated[int, typer.Option(help="what its chunks may take up in the cluster; 0 for no limit")] = 0,
    folder: Folder = _FOLDER,
    gateway: Gateway = "",
) -> None:
    """Bound what a namespace may take up, and for how long."""
    cluster_commands.set_policy(namespace, ttl_s, quota_mib << 20, folder, gateway)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="where the trace and the picture go")] = Path("quire-demo"),
    gateway: Annotated[str, typer.Option("--endpoint", help="use a running cluster instead of a new one")] = "",
) -> None:
    """A real model reuses a prefix that another process computed; then a storage node dies."""
    from quire.cli.demo import Demo

    Demo(folder, gateway).run()


@bench_app.command("lookup")
def bench_lookup(
    context: int = 65_536,
    chunk_tokens: int = 16,
    rounds: int = 200,
    clients: int = 4,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Longest match through gRPC, warm, and look-ups per second at saturation."""
    from quire.bench import lookup as bench

    bench.run(context, chunk_tokens, rounds, clients).show(json_file, plot)


@bench_app.command("delivery")
def bench_delivery(
    tier: str = "memory",
    chunk_tokens: Annotated[str, typer.Option(help="one or several: 16,64,256")] = "16,64,256",
    context: int = 65_536,
    hit: float = 0.875,
    layers: int = 32,
    rounds: int = 7,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Layerwise delivery (Llama 3.1 8B layout) against a bare pyucx stream of the same layers in the same run."""
    from quire.bench import delivery

    sizes = [int(text) for text in chunk_tokens.split(",")]
    delivery.run(tier, sizes, context, hit, layers, rounds).show(json_file, plot)


def _add_benchmarks() -> None:
    """Those of the services that are installed."""
    for entry in sorted(entry_points(group="quire.bench"), key=lambda entry: entry.name):
        bench_app.command(entry.name)(entry.load())


def main() -> None:
    """Entry point: a `QuireError` is one line and status 1, no stack trace."""
    try:
        _add_benchmarks()
        app()
    except QuireError as error:
        Console(stderr=True).print(f"[bold red]{error.code()}[/]: {error}")
        sys.exit(1)


__all__ = ["app", "main"]
