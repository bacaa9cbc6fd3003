"""A machine with twenty times as much to do as it has processors: no member counts as dead, and nothing is lost."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import time
from pathlib import Path

import numpy as np
import pytest

from quire.client import AsyncClient
from quire.model.durability import Durability
from quire.model.errors import QuireError
from quire_bench.processor import competitors
from quire_tools.local import LocalCluster
from tests.e2e.helpers import fetch_all, fresh_namespace, random_payload, some_keys, store

_STARVED_S = 60
_OVERSUBSCRIBED = 20
_WRONG = {"NODE_AWAY", "NO_STORAGE", "NO_SCHEDULER", "MEMBER_REFUSED", "ONE_COPY"}
"""Failed checks of a broken cluster."""


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_starved_machine_costs_no_member_and_no_read(tmp_path: Path) -> None:
    """The cluster has the default settings."""
    usual = {"QUIRE_ORCHESTRATOR_MEMBER_TTL_MS": "3000", "QUIRE_GATEWAY_LATE_MAX_MS": ""}
    counts: collections.Counter[str] = collections.Counter()
    with LocalCluster(tmp_path, storage_nodes=3, decoders=0, arena_bytes=96 << 20, settings=usual) as cluster:
        async with AsyncClient(cluster.gateway_address, timeout_s=60) as client:
            namespace = fresh_namespace()
            keys, payload = some_keys(namespace, 60), random_payload(namespace, 60)
            await store(client, namespace, keys, payload, durability=Durability.REPLICATED)
            with competitors(_OVERSUBSCRIBED * (os.cpu_count() or 1)):
                end_s = time.monotonic() + _STARVED_S
                while time.monotonic() < end_s:
                    with contextlib.suppress(QuireError):
                        counts.update({check.code for check in await client.health()})
                        counts["looks"] += 1
                    with contextlib.suppress(QuireError):
                        lookup = await client.lookup(namespace, keys)
                        got, _ = await fetch_all(client, lookup)
                        assert np.array_equal(got, payload[:, : lookup.matched_chunks])
                        counts["reads"] += 1
                        counts["whole reads"] += lookup.matched_chunks == len(keys)
                    await asyncio.sleep(0.5)
            print(dict(counts))
            assert counts["looks"] > 3 and counts["reads"] and not _WRONG & counts.keys(), counts

            async def is_well() -> bool:
                return not await client.health()

            deadline_s = time.monotonic() + 60
            while not await is_well():
                assert time.monotonic() < deadline_s, await client.health()
                await asyncio.sleep(1)
            lookup = await client.lookup(namespace, keys)
            assert np.array_equal((await fetch_all(client, lookup))[0], payload)
