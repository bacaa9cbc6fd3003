"""A production trace, time-compressed, by public requests: answers stay right, memory and file handles stay flat.

`make soak` replays an hour of it; CI a short stretch. Skipped where the trace is not at hand.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
import redis

from quire.client import AsyncClient
from quire.model.errors import QuireError
from quire.model.hashing import engine_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire_tools.local import LocalCluster
from tests.e2e.helpers import fetch_all, fresh_namespace, store

TRACE = Path(__file__).parents[3] / "shared" / "data" / "mooncake_conversation_trace.jsonl"
SECONDS = float(os.environ.get("QUIRE_SOAK_SECONDS", "15"))
TRACE_S = float(os.environ.get("QUIRE_SOAK_TRACE_S", "120"))
"""So much of the trace is replayed in that time: the whole hour in `make soak`."""

LAYOUT = KvLayout(4, 16, 4, 32, Dtype.BF16)
"""32 KiB a chunk: the trace's prompts are long."""
AT_ONCE = 8


@dataclass(frozen=True)
class Request:
    at_s: float
    blocks: tuple[int, ...]


def _requests() -> list[Request]:
    found = []
    for line in TRACE.read_text().splitlines():
        record = json.loads(line)
        if record["timestamp"] / 1e3 > TRACE_S:
            break
        found.append(Request(record["timestamp"] / 1e3, tuple(record["hash_ids"])))
    return found


def _payload(blocks: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """(layers, chunks, slice bytes): what each block must always be."""
    slices = np.empty((LAYOUT.num_layers, len(blocks), LAYOUT.slice_bytes), np.uint8)
    for at, block in enumerate(blocks):
        slices[:, at] = np.arange(LAYOUT.slice_bytes, dtype=np.uint32) * (block + 1) >> 3
    return slices


def _digests(blocks: tuple[int, ...]) -> ChunkKeys:
    """The trace's ids name blocks together with what is before them, as an engine's digests do."""
    return ChunkKeys(b"".join(hashlib.sha256(block.to_bytes(8, "little")).digest() for block in blocks))


@pytest.mark.skipif(not TRACE.exists(), reason="the trace is not at hand")
@pytest.mark.timeout(SECONDS * 2 + 120)
@pytest.mark.long
def test_memory_and_handles_stay_flat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The caches are full before the first look, so that what grows afterwards has no business to."""
    with LocalCluster(tmp_path, storage_nodes=2, arena_bytes=64 << 20, drive_bytes=128 << 20) as cluster:
        looks, done, failed = asyncio.run(_replay(cluster))
        with capsys.disabled():
            print(f"\n{done} requests, {failed.total()} failed; MiB and file handles at the middle and at the end:")
            for name in looks[0]:
                (before, files), (after, files_after) = looks[0][name], looks[-1][name]
                print(f"  {name:<14}{before:7.1f} → {after:6.1f} MiB   {files:4} → {files_after:4}")
        assert not failed, failed.most_common(5)
        for name, (before, files) in looks[0].items():
            after, files_after = looks[-1][name]
            if name == "redis":  # the index grows with what the object tier has, and with nothing else
                indexed = [look["chunks"][1] for look in looks]
                before *= max(1.0, indexed[-1] / indexed[0])
            if name == "chunks":
                continue
            assert after < before * 1.10 + 12, f"{name}: {before:.0f} MiB, later {after:.0f}"
            assert files_after <= files + 12, f"{name}: {files} file handles, later {files_after}"


async def _replay(cluster: LocalCluster) -> tuple[list[dict[str, tuple[float, int]]], int, Counter[str]]:
    namespace, requests = fresh_namespace(LAYOUT), _requests()
    looks: list[dict[str, tuple[float, int]]] = []
    gate, done, failed = asyncio.Semaphore(AT_ONCE), 0, Counter[str]()
    started, rate = time.monotonic(), TRACE_S / SECONDS

    async with AsyncClient(cluster.gateway_address) as client:

        async def serve(request: Request) -> None:
            nonlocal done, failed
            try:
                keys = engine_keys(namespace, _digests(request.blocks))
                expected = _payload(request.blocks)
                found = await client.lookup(namespace, keys)
                cached = found.matched_chunks
                if cached:
                    got, summary = await fetch_all(client, found)
                    assert np.array_equal(got[:, : summary.usable_chunks], expected[:, : summary.usable_chunks])
                if cached < len(keys):
                    await store(client, namespace, keys, np.ascontiguousarray(expected[:, cached:]), first=cached)
                # Not before: what the new chunks extend must not be evicted meanwhile.
                await client.release(found)
            except QuireError as error:
                failed[repr(error)] += 1
            finally:
                done += 1
                gate.release()

        async with asyncio.TaskGroup() as tasks:  # a wrong byte ends all of it
            for request in requests:
                await asyncio.sleep(max(0.0, started + request.at_s / rate - time.monotonic()))
                await gate.acquire()
                tasks.create_task(serve(request))
                if not looks and request.at_s > TRACE_S / 2:
                    looks.append(_look(cluster))
    looks.append(_look(cluster))
    return looks, done, failed


def _look(cluster: LocalCluster) -> dict[str, tuple[float, int]]:
    """Resident MiB and open files of each service; and how many chunks the index lists in the object tier."""
    index = redis.from_url(cluster.redis_url)
    counts = [cast(bytes, index.hget(key, "@object")) or b"0" for key in index.scan_iter("quire:l:*")]
    index.close()
    found = {"chunks": (0.0, sum(int(each.partition(b":")[0]) for each in counts))}
    for name in cluster.names:
        process = Path("/proc") / str(cluster.pid(name))
        pages = int((process / "statm").read_text().split()[1])
        found[name] = (pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(list((process / "fd").iterdir())))
    return found
