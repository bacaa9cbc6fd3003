"""After the faults: `python -m tests.chaos.verify HISTORY SEED JOB LEVEL…`. Status 1 says why."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from quire.client import AsyncClient
from quire.model.errors import QuireError
from quire.model.nodes import Node, Role
from tests.chaos import history
from tests.chaos.history import Event
from tests.e2e import s3_signing
from tests.e2e.helpers import fetch_all

_QUIET_S = 60.0


async def main(file: Path, seed: int, job: dict[str, Any], levels: list[str]) -> list[str]:
    events = history.read(file)
    async with AsyncClient(job["gateway"], timeout_s=20) as client:
        wrong = await _promises(client, history.promised(events, levels), seed)
        wrong += await _quiet(client)
    wrong += await _objects(history.promised_objects(events), seed, job)
    return wrong + _leases(job["metrics"])


async def _promises(client: AsyncClient, promised: dict[int, Event], seed: int) -> list[str]:
    """Every acknowledged chunk is found and has its bytes; an index that is being rebuilt gets its time."""
    deadline, wrong = time.monotonic() + _QUIET_S, []
    for prefix, event in promised.items():
        keys, expected = (
            history.keys_of(seed, prefix, event.chunks),
            history.payload_of(seed, prefix, event.chunks),
        )
        while True:
            problem = await _problem(client, seed, keys, expected)
            if not problem or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
        if problem:
            wrong.append(f"prefix {prefix}, {event.chunks} chunks, acknowledged {event.level}: {problem}")
    return wrong


async def _problem(client: AsyncClient, seed: int, keys: Any, expected: Any) -> str:
    try:
        found = await client.lookup(history.namespace(seed), keys)
        if found.matched_chunks < len(keys):
            await client.release(found)
            return f"{found.matched_chunks} are found"
        got, summary = await fetch_all(client, found)
        await client.release(found)
    except QuireError as error:
        return repr(error)
    if summary.usable_chunks < len(keys):
        return f"{summary.usable_chunks} were delivered"
    return "" if np.array_equal(got, expected) else "other bytes"


async def _quiet(client: AsyncClient) -> list[str]:
    """Every node is a member again, and nothing runs without a request."""
    deadline = time.monotonic() + _QUIET_S
    while True:
        nodes = list(await client.status())
        wrong = _busy(nodes)
        if not wrong or time.monotonic() > deadline:
            return wrong
        await asyncio.sleep(0.5)


def _busy(nodes: list[Node]) -> list[str]:
    wrong = []
    storage = [node for node in nodes if node.role is Role.STORAGE]
    if len(storage) != 3:
        wrong.append(f"members: {[node.node_id for node in nodes]}")
    for node in nodes:
        stats = node.stats
        names = ["deliveries", "ingests", "transfers", "rate.granted", "rate.fallback"]
        names += [name for name in stats if name.startswith("link.") and name.endswith(".granted")]
        wrong += [f"{node.node_id}: {name} is {stats[name]}" for name in names if stats.get(name)]
    return wrong


async def _objects(promised: dict[int, bool], seed: int, job: dict[str, Any]) -> list[str]:
    wrong = []
    for name, there in promised.items():
        url = f"http://{job['s3_address']}/chaos/{name}"
        status, _, body = await s3_signing.request("GET", url, tuple(job["key"]))
        if there and (status != 200 or body != history.object_of(seed, name)):
            wrong.append(f"object {name}: status {status}, {len(body)} bytes")
        elif not there and status != 404:
            wrong.append(f"object {name} was deleted: status {status}")
    return wrong


def _leases(metrics: dict[str, str]) -> list[str]:
    """Those of clients that were cut off run out; the others were given back."""
    deadline = time.monotonic() + _QUIET_S + 10
    while True:
        held = 0.0
        for name, address in metrics.items():
            if name.startswith("orchestrator"):
                text = urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read().decode()
                held += sum(float(line.split()[-1]) for line in text.splitlines() if _is_leased(line))
        if not held or time.monotonic() > deadline:
            return [f"{held:g} leases are held"] if held else []
        time.sleep(1)


def _is_leased(line: str) -> bool:
    return line.startswith("quire_index_leased")


if __name__ == "__main__":
    problems = asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4:]))
    print("\n".join(problems[:40]))
    sys.exit(bool(problems))
