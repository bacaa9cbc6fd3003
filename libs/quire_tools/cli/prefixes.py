"""`quire cache retain`, `prefetch` and `drop`: the future of a prefix."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from quire.client import Client
from quire.model.hashing import Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire_tools.cli.cluster import read_namespace

console = Console(highlight=False)


def retain(file: Path, namespace_file: Path, hours: float, gateway: str) -> None:
    """Retain a prefix; 0 hours end it."""
    namespace, keys = _prefix(file, namespace_file)
    with Client(gateway) as client:
        if not hours:
            ended = client.end_retention(namespace, keys)
            console.print("it may go again" if ended else "it was not retained")
            return
        chunks = client.retain(namespace, keys, hours * 3600)
    console.print(f"{chunks} of {len(keys)} chunks are kept for {hours:g} h")


def prefetch(file: Path, namespace_file: Path, within_s: float, gateway: str) -> None:
    """Returns when it is there."""
    namespace, keys = _prefix(file, namespace_file)
    with Client(gateway) as client:
        chunks = client.prefetch(namespace, keys, within_s=within_s)
    console.print(f"{chunks} of {len(keys)} chunks lie in memory")


def drop(file: Path, namespace_file: Path, keep_chunks: int, keep_objects: bool, gateway: str) -> None:
    """Drop a prefix from its end."""
    namespace, keys = _prefix(file, namespace_file)
    with Client(gateway) as client:
        give_up = client.demote if keep_objects else client.evict
        chunks = give_up(namespace, keys, keep_chunks=keep_chunks)
    where = "are in the object tier alone" if keep_objects else "are gone"
    console.print(f"{chunks} of {len(keys)} chunks {where}")


def _prefix(file: Path, namespace_file: Path) -> tuple[Namespace, ChunkKeys]:
    namespace = read_namespace(namespace_file)
    return namespace, block_keys(namespace, list(file.read_bytes()))
