"""Images as a public site serves them: clients that hang up, ask for too much, or for too many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from quire.client import AsyncClient, ImageClient
from quire.model.latents import LatentInfo, Vae
from quire_decoder.adapters.weights import weights_digest
from quire_tools.local import LocalCluster

HUGE = {"width": "8000", "height": "8000", "enlarge": "1", "format": "webp"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, vae: Path) -> Iterator[LocalCluster]:
    settings = {"QUIRE_DECODER_MODELS": str(vae), "QUIRE_GATEWAY_IMAGES_ENLARGE": "true"}
    with LocalCluster(
        tmp_path_factory.mktemp("public"), decoders=1, arena_bytes=128 << 20, settings=settings
    ) as running:
        yield running


@pytest.fixture
async def http(cluster: LocalCluster, vae: Path) -> AsyncIterator[aiohttp.ClientSession]:
    values = np.random.default_rng(1).normal(size=(4, 16, 16)).astype(np.float16)
    info = LatentInfo((4, 16, 16), "float16", Vae("tiny", "", weights_digest(vae)), 64, 64)
    async with AsyncClient(cluster.gateway_address) as client:
        await ImageClient(client).put("cat", values, info)
    async with aiohttp.ClientSession(f"http://{cluster.http_address}") as session:
        yield session


async def test_clients_that_hang_up_leave_nothing_behind(http: aiohttp.ClientSession) -> None:
    """More of them than the gateway may have buffers in quarantine: their decodes end, and their memory is free again.

    A small image comes while the large ones are encoded.
    """

    async def get(params: dict[str, str]) -> str:
        async with http.get("/v1/images/cat", params=params) as answer:
            await answer.read()
            assert answer.status == 200
            return answer.content_type

    async with asyncio.timeout(90):
        for _ in range(6):
            large = [asyncio.create_task(get(HUGE)) for _ in range(12)]
            assert await get({"width": "16", "format": "jpeg"}) == "image/jpeg"
            assert not any(task.done() for task in large), "it waited for one of them"
            for task in large:
                task.cancel()
            await asyncio.wait(large)
        assert await get({}) == "image/png"
