"""`quire cache`: prefixes that are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quire_tools.cli.options import FOLDER, Admin, AsJson, Folder, Gateway

cache_app = typer.Typer(no_args_is_help=True, help="Prefixes that are stored: found, kept, fetched ahead, dropped.")
TextFile = Annotated[Path, typer.Argument(help="text; its bytes are the tokens, as in the demo")]
NamespaceFile = Annotated[Path, typer.Option(help="the namespace, as JSON (the demo writes one)")]


@cache_app.command()
def lookup(
    file: TextFile,
    namespace: NamespaceFile,
    folder: Folder = FOLDER,
    gateway: Gateway = "",
    as_json: AsJson = False,
) -> None:
    """How much of a text's prefix is cached, and where. No side effect."""
    from quire_tools.cli import cluster as cluster_commands

    cluster_commands.lookup(file, namespace, cluster_commands.gateway_of(folder, gateway), as_json=as_json)


@cache_app.command()
def retain(
    file: TextFile,
    namespace: NamespaceFile,
    hours: Annotated[float, typer.Option(help="for how long; 0: no longer")] = 24.0,
    folder: Folder = FOLDER,
    gateway: Gateway = "",
) -> None:
    """Keep the stored part of a text's prefix from being evicted."""
    from quire_tools.cli import cluster as cluster_commands
    from quire_tools.cli import prefixes

    prefixes.retain(file, namespace, hours, cluster_commands.gateway_of(folder, gateway))


@cache_app.command()
def prefetch(
    file: TextFile,
    namespace: NamespaceFile,
    within_s: Annotated[float, typer.Option(help="when it is wanted; 0: at once")] = 0.0,
    folder: Folder = FOLDER,
    gateway: Gateway = "",
) -> None:
    """Bring the stored part of a text's prefix into memory."""
    from quire_tools.cli import cluster as cluster_commands
    from quire_tools.cli import prefixes

    prefixes.prefetch(file, namespace, within_s, cluster_commands.gateway_of(folder, gateway))


@cache_app.command()
def drop(
    file: TextFile,
    namespace: NamespaceFile,
    keep_chunks: Annotated[int, typer.Option(help="from the start, which stay")] = 0,
    keep_objects: Annotated[bool, typer.Option(help="from memory and drives only, what the object tier has")] = False,
    folder: Folder = FOLDER,
    gateway: Gateway = "",
) -> None:
    """Drop the stored part of a text's prefix, from its end, but for chunks that others extend, lease or retain."""
    from quire_tools.cli import cluster as cluster_commands
    from quire_tools.cli import prefixes

    prefixes.drop(file, namespace, keep_chunks, keep_objects, cluster_commands.gateway_of(folder, gateway))


@cache_app.command()
def events(
    after: Annotated[str, typer.Option(help="go on behind this cursor; from now on without")] = "",
    zmq: Annotated[str, typer.Option(help="publish them as vLLM's KV events there, e.g. tcp://127.0.0.1:5557")] = "",
    topic: Annotated[str, typer.Option(help="with --zmq: the topic")] = "",
    curve: Annotated[
        Path | None,
        typer.Option(help="with --zmq beyond this host: folder with server.key_secret and clients/*.key (ZMQ's CURVE)"),
    ] = None,
    folder: Folder = FOLDER,
    admin: Admin = "",
) -> None:
    """Chunks as they come and go, one JSON a line, until Ctrl-C."""
    from quire_tools.cli.views.events import follow

    follow(folder, admin, after, zmq, topic, curve)
