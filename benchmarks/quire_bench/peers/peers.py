"""`quire bench peers`: the same objects into Quire and into what else holds them, and out again, in one run.

Objects of random bytes, all at once: whole, and by layers as an engine keeps its KV cache. Every load is compared with
what was stored. Rounds of all stores are in turns. One machine, everything over its loopback: Quire over UCX, without
shared memory.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from rich.console import Console

from quire.model.errors import ConfigInvalid, InternalError, InvalidRequest
from quire.transport import OFF
from quire_bench.peers.stores import (
    Bytes,
    MooncakeStore,
    QuireStore,
    RedisStore,
    S3Store,
    Store,
    mooncake_servers,
    redis_server,
)
from quire_tools.local import LocalCluster
from quire_tools.report import Report, Row, median

_LAYERS: Final = 16
_WARM_ROUNDS: Final = 1
_FORMS: Final = ("whole", "by layers")
_SETTINGS: Final = {"QUIRE_STORAGE_DRIVES": "", "QUIRE_STORAGE_OBJECT_URL": "", "QUIRE_SHARED_MEMORY": OFF}


def _count(size: int) -> int:
    """Objects of a round: 200 small ones, fewer of the larger ones."""
    return max(8, min(200, (64 << 20) // size))


def _stores(stack: ExitStack, folder: Path, arena_bytes: int, s3: str, options: dict[str, str]) -> list[Store]:
    """Quire first. What is not installed is left out, and said."""
    slab = {"QUIRE_STORAGE_SLAB_BYTES": str(64 << 20)}
    cluster = stack.enter_context(LocalCluster(folder / "quire", arena_bytes=arena_bytes, settings=_SETTINGS | slab))
    quire = QuireStore(cluster)
    stack.callback(quire.close)
    made: list[Store] = [quire, RedisStore(stack.enter_context(redis_server(folder)))]
    try:
        import mooncake  # noqa: F401

        made.append(MooncakeStore(*stack.enter_context(mooncake_servers(folder, arena_bytes))))
    except (ImportError, ConfigInvalid) as error:
        Console(stderr=True).print(f"without Mooncake: {error}", highlight=False)
    if s3:
        made.append(S3Store(s3, options))
    return made


def _timed(store: Store, round_: str, source: Bytes, target: Bytes) -> tuple[float, float]:
    """Seconds to store and to load. Raises `InternalError` for other bytes."""
    target[:] = 0
    began = time.perf_counter()
    store.put(round_, source)
    stored = time.perf_counter()
    store.get(round_, target)
    loaded = time.perf_counter()
    if not np.array_equal(source, target):
        raise InternalError(f"{store.name}: other bytes than were stored")
    return stored - began, loaded - stored


def _measure(
    stores: Sequence[Store], size: int, form: str, rounds: int, failures: dict[str, str]
) -> dict[str, tuple[float, float]]:
    """GB/s stored and loaded, by store; of one that fails, which `failures` are told of, not a number."""
    count = _count(size)
    shape = (count, size) if form == "whole" else (_LAYERS, count, size // _LAYERS)
    draw = np.random.default_rng(size)
    payload = draw.integers(0, 256, count * size, dtype=np.uint8)
    memory = {store.name: (store.memory(count * size), store.memory(count * size)) for store in stores}
    seconds: dict[str, list[tuple[float, float]]] = {store.name: [] for store in stores}
    for number in range(_WARM_ROUNDS + rounds):
        for store in stores:
            source, target = (each.reshape(shape) for each in memory[store.name])
            source[:] = payload.reshape(shape)
            source.reshape(-1)[:8] = np.frombuffer(np.int64(number).tobytes(), dtype=np.uint8)
            name = f"{size}-{form.replace(' ', '-')}-{number}"
            try:
                took = _timed(store, name, source, target)
            except InternalError as error:
                if store.name == "Quire":
                    raise
                failures[store.name] = str(error)
                continue
            store.clear(name)
            if number >= _WARM_ROUNDS:
                seconds[store.name].append(took)
    total = count * size / 1e9
    return {
        name: (median([total / put for put, _ in took]), median([total / got for _, got in took]))
        if len(took) == rounds
        else (math.nan, math.nan)
        for name, took in seconds.items()
    }


def run(sizes_kib: list[int], rounds: int, s3: str, options: dict[str, str]) -> Report:
    """Raises `InvalidRequest`, and `InternalError` where a store returns other bytes."""
    if not sizes_kib or min(sizes_kib) < 1 or rounds < 1:
        raise InvalidRequest(f"{sizes_kib}, {rounds}", field="sizes")
    report = Report("peers", {"name": "the best of the others, same run", "unit": "GB/s"}, tall=True)
    largest = max(_count(size << 10) * (size << 10) for size in sizes_kib)
    with (
        tempfile.TemporaryDirectory(prefix="quire-peers-") as name,
        ExitStack() as stack,
        Console().status("") as status,
    ):
        stores = _stores(stack, Path(name), 6 * largest + (512 << 20), s3, options)
        for size, form in product(sizes_kib, _FORMS):
            status.update(f"{size} KiB, {form}")
            failures: dict[str, str] = {}
            seen = _measure(stores, size << 10, form, rounds, failures)
            report.notes += [f"{size} KiB, {form}: {each}: {why}" for each, why in failures.items()]
            for at, what in enumerate(("load", "store")):
                rates = {each: both[1 - at] for each, both in seen.items()}
                best = np.nanmax([rate for each, rate in rates.items() if each != "Quire"])
                params = {"what": what, "KiB": size, "objects": _count(size << 10), "form": form}
                report.rows.append(Row(params, rates, float(best), rates["Quire"] / float(best)))
    report.notes += [
        f"all objects of a round in one call where a store has one; {_LAYERS} layers; medians of {rounds} rounds",
        "each byte that was loaded is compared; Quire checks it, too, against checksums, and no other does",
    ]
    return report


def command(
    sizes: Annotated[str, typer.Option(help="of an object, KiB, one or several")] = "64,1024,16384",
    rounds: Annotated[int, typer.Option(help="of each store, in turns")] = 7,
    s3: Annotated[str, typer.Option(help="an S3 server to compare with too: s3://BUCKET")] = "",
    endpoint: Annotated[str, typer.Option(help="its address: http://HOST:PORT")] = "",
    access_key: Annotated[str, typer.Option(help="for it", envvar="AWS_ACCESS_KEY_ID")] = "",
    secret_key: Annotated[str, typer.Option(help="for it", envvar="AWS_SECRET_ACCESS_KEY")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw the result there (PNG)")] = None,
) -> None:
    """Objects into Quire, Redis, Mooncake (if installed) and an S3 server (if named), and out: whole and by layers."""
    options = {
        "aws_endpoint": endpoint,
        "aws_access_key_id": access_key,
        "aws_secret_access_key": secret_key,
        "aws_region": "us-east-1",
    }
    given = {name: value for name, value in options.items() if value}
    run([int(text) for text in sizes.split(",")], rounds, s3, given).show(json_file, plot)
