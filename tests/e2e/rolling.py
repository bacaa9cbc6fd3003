"""Services stopped and started one after the other while look-ups, fetches, stores and images go on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np

from quire.client import AsyncClient, ImageClient
from quire.model.durability import Durability
from quire.model.errors import TooManyRequests
from quire.model.latents import LatentInfo, Normalisation, Vae
from quire_decoder.adapters.weights import weights_digest
from quire_tools.local import LocalCluster
from tests.e2e.helpers import fetch_all, fresh_namespace, random_payload, some_keys, store

CHUNKS = 8


async def roll(
    cluster: LocalCluster,
    names: Sequence[str],
    environment: dict[str, str] | None = None,
    *,
    vae: Path | None = None,
) -> Counter[str]:
    """Renew each of `names`, with `environment` from then on; return how often each kind of work succeeded.

    A store, an image (with `vae`) or a fetch that fails is a lost request, and so is a wrong byte: they raise. A miss
    is none, and neither is a refusal that names a time to come back: a gateway that is late on a busy machine sheds
    load.
    """
    done: Counter[str] = Counter()
    stop = asyncio.Event()
    async with AsyncClient(cluster.gateway_address, timeout_s=20) as client:
        images = ImageClient(client)
        namespace, payload = fresh_namespace(), random_payload(fresh_namespace(), CHUNKS)
        keys = some_keys(namespace, CHUNKS)
        await store(client, namespace, keys, payload, durability=Durability.REPLICATED)
        expected = await _image(images, vae) if vae else b""

        async def fetching() -> None:
            found = await client.lookup(namespace, keys)
            if not found.matched_chunks:
                done["miss"] += 1
                return
            got, _ = await fetch_all(client, found)
            assert np.array_equal(got, payload[:, : found.matched_chunks])
            await client.release(found)
            done["hit"] += 1

        async def storing() -> None:
            fresh = fresh_namespace()
            await store(client, fresh, some_keys(fresh, 2), payload[:, :2])

        async def looking() -> None:
            assert (await images.get("rolling")).data == expected

        work = [fetching, fetching, storing, *([looking] if vae else [])]
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(_again(each, stop, done))
            for name in names:
                before = done["hit"]
                await asyncio.to_thread(cluster.renew, name, environment=environment)
                async with asyncio.timeout(30):
                    while done["hit"] <= before + 2:
                        await asyncio.sleep(0.05)
            stop.set()
        found = await client.lookup(namespace, keys)
        assert found.matched_chunks == CHUNKS, "acknowledged on two nodes"
        await client.release(found)
    return done


async def _image(images: ImageClient, vae: Path) -> bytes:
    values = np.random.default_rng(1).standard_normal((4, 16, 16)).astype(np.float16)
    info = LatentInfo((4, 16, 16), "float16", Vae("tiny", "", weights_digest(vae)), 64, 64, Normalisation())
    await images.put("rolling", values, info, durability=Durability.REPLICATED)
    return (await images.get("rolling")).data


async def _again(work: Callable[[], Awaitable[None]], stop: asyncio.Event, done: Counter[str]) -> None:
    while not stop.is_set():
        try:
            await work()
        except TooManyRequests as refused:
            assert refused.retry_after_s > 0
            await asyncio.sleep(refused.retry_after_s)
            continue
        done[work.__name__] += 1
        await asyncio.sleep(0.02)
