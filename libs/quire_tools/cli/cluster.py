"""`quire up`, `quire page`, `quire cache lookup`; and how commands reach a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console

from quire.client import AdminClient, Client
from quire.model.errors import ConfigInvalid, InvalidRequest
from quire.model.hashing import Namespace, block_keys
from quire.model.health import Check
from quire.model.nodes import Node
from quire.wire.credentials import page_token
from quire.wire.tls import MEMBER_NAME, tls_of_environment
from quire_server.config import value_of
from quire_tools.cli.options import FOLDER
from quire_tools.local import LocalCluster, read_state
from quire_tools.local.supervisor import Supervisor

console = Console()
_OF_DECODERS: Final = ("diffusers", "imagecodecs", "PIL", "safetensors", "torch")
"""Packages without which a decoder does not start."""


def up(cluster: LocalCluster) -> None:
    """Run a cluster until SIGINT or SIGTERM; services that end are started again."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    try:
        with console.status("starting"):
            cluster.start()
        console.print(f"gateway [bold]{cluster.gateway_address}[/]; files in {cluster.folder}; Ctrl-C stops it")
        for line in moved(cluster):
            console.print(line)
        where = "" if cluster.folder == FOLDER else f" --folder {cluster.folder}"
        console.print(
            f"the cluster as a page: http://{cluster.page_address}/ (`quire page{where}` prints user and password)",
            soft_wrap=True,
        )
        console.print(f"operators {cluster.admin_address}, metrics of each service in {cluster.folder}/cluster.json")
        console.print(f"images http://{cluster.http_address}/v1/images, S3 http://{cluster.s3_address} (`quire keys`)")
        for name in cluster.names:
            console.print(f"  {name:<14}{cluster.address(name)}  pid {cluster.pid(name)}")
        for command, purpose in _next(cluster):
            console.print(f"  [bold]{command}[/]  [dim]# {purpose}[/]", soft_wrap=True)
        supervisor = Supervisor(cluster, console.print)
        while not stopped.wait(0.25):
            supervisor.look(time.monotonic())
    finally:
        with console.status("stopping"):
            cluster.stop()


def moved(cluster: LocalCluster) -> list[str]:
    """Return a line for each usual port that was taken."""
    return [
        f"[yellow]port {usual} is taken[/]: {port} in its place" for usual, port in cluster.gateway_ports.moved.items()
    ]


def _next(cluster: LocalCluster) -> list[tuple[str, str]]:
    """Return example commands, to be pasted into another terminal."""
    where = "" if cluster.folder == FOLDER else f" --folder {cluster.folder}"
    return [
        (f"quire status{where}", "who is there, and what they hold"),
        (f"quire top{where}", "the cluster as it works"),
        (f"quire demo --gateway {cluster.gateway_address}", "a model reuses what another process computed"),
        (f"curl http://{cluster.http_address}/v1/images", "the images that are stored"),
    ]


def count_decoders(number: int | None) -> int:
    """Return the number of decoders to start.

    Args:
        number: As the user gave it; None for one, or none where their packages are not installed.

    Raises:
        ConfigInvalid: Decoders were asked for whose packages are not installed.
    """
    absent = [name for name in _OF_DECODERS if importlib.util.find_spec(name) is None]
    if not absent:
        return 1 if number is None else number
    advice = f"{', '.join(absent)} not installed here: pip install 'quire[decoder]'"
    if number:
        raise ConfigInvalid(f"{number} decoders: {advice}", field="decoders")
    if number is None:
        console.print(f"without a decoder of images: {advice}", soft_wrap=True, markup=False)
    return 0


def decoder_settings(models: Path) -> dict[str, str]:
    """Return the settings for decoders with the VAEs of a folder.

    They are its own, a pipeline's, or those of the folders below.

    Raises `InvalidRequest` where there is none.
    """
    candidates = [models, models / "vae", *sorted(models.glob("*")), *sorted(models.glob("*/vae"))]
    folders = [
        candidate
        for candidate in candidates
        if any(candidate.glob("*.safetensors")) and (candidate / "config.json").is_file()
    ]
    if not folders:
        raise InvalidRequest(f"no folder with config.json and .safetensors in {models}", field="models")
    if any("," in str(folder) for folder in folders):
        raise InvalidRequest(f"{models} has a comma in its name", field="models")
    return {"QUIRE_DECODER_MODELS": ",".join(map(str, folders))}


def lookup(file: Path, namespace_file: Path, gateway: str, *, as_json: bool) -> None:
    """Show the chunks that a fetch of this text would find."""
    namespace = read_namespace(namespace_file)
    keys = block_keys(namespace, list(file.read_bytes()))
    with Client(gateway) as client:
        match = client.lookup(namespace, keys, lease_ttl_ms=0)
    if as_json:
        about = {"chunks": len(keys), "matched_chunks": match.matched_chunks, "matched_tokens": match.matched_tokens}
        print(json.dumps({**about, "ranges": [asdict(run) for run in match.ranges]}, indent=2))
        return
    size = namespace.layout.payload_bytes(match.matched_chunks)
    console.print(
        f"{match.matched_tokens} of {len(keys) * namespace.layout.chunk_tokens} tokens in whole chunks are cached "
        f"({match.matched_chunks} chunks, {size / 2**20:.1f} MiB); Redis took {match.index_us} µs"
    )
    for run in match.ranges:
        console.print(f"  chunks {run.first}–{run.stop - 1} at {run.node_id}")


def page(folder: Path) -> None:
    """Print the password by QUIRE_CLUSTER_SECRET, or address, user and password of the cluster on `folder`."""
    if secret := value_of("QUIRE_CLUSTER_SECRET", os.environ):
        print(page_token(secret.encode()))
    else:
        password = page_token((folder / "secret").read_text().encode())
        print(f"http://{read_state(folder)['page']}/\nuser      operator\npassword  {password}")


def gateway_of(folder: Path, gateway: str) -> str:
    """The gateway asked for, or that of the cluster on `folder`."""
    return gateway or str(read_state(folder)["gateway"])


class Look(NamedTuple):
    """Access to a cluster: its members, and the checks that it fails."""

    members: Callable[[], Sequence[Node]]
    health: Callable[[], Sequence[Check]]


@contextlib.contextmanager
def looking(folder: Path, gateway: str, admin: str, *, timeout_s: float = 10.0) -> Iterator[Look]:
    """Reach a cluster by `gateway` as a client, else as an operator. Raises `InvalidRequest` for both."""
    if gateway and admin:
        raise InvalidRequest("give one of --gateway and --admin", field="admin")
    if gateway:
        with Client(gateway, timeout_s=timeout_s) as client:
            yield Look(lambda: client.status(with_away=True), client.health)
        return
    with asyncio.Runner() as runner:
        operator = _operator(folder, admin, timeout_s)
        try:
            yield Look(lambda: runner.run(operator.status(with_away=True)), lambda: runner.run(operator.health()))
        finally:
            runner.run(operator.close())


def as_operator(folder: Path, admin: str, work: Callable[[AdminClient], Awaitable[None]]) -> None:
    """At `admin` with QUIRE_CLUSTER_SECRET, or at the cluster on `folder`."""

    async def run() -> None:
        async with _operator(folder, admin) as operator:
            await work(operator)

    asyncio.run(run())


def _operator(folder: Path, admin: str, timeout_s: float = 10.0) -> AdminClient:
    """Open the admin frontend. Raises `InvalidRequest` without the cluster's secret."""
    secret = value_of("QUIRE_CLUSTER_SECRET", os.environ)
    if admin and not secret:
        raise InvalidRequest("must be set for --admin", field="QUIRE_CLUSTER_SECRET")
    if not admin:
        admin, secret = str(read_state(folder)["admin"]), (folder / "secret").read_text()
    return AdminClient(admin, secret, tls=tls_of_environment(MEMBER_NAME), timeout_s=timeout_s)


def write_namespace(file: Path, namespace: Namespace) -> None:
    """Write it as JSON, for `read_namespace`."""
    file.write_text(namespace.to_json())


def read_namespace(file: Path) -> Namespace:
    """Read a namespace. Raises `InvalidRequest`, with the reason."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file}: {error}", field="namespace") from None
    return Namespace.from_json(text)
