"""The scripts in `examples/`, as their pages show them."""

from __future__ import annotations

import asyncio
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire_server.redis import AccessKeys, connect
from quire_tools.local import LocalCluster
from quire_tools.local.pictures import VAE_FOLDER
from tests import fork_server

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline") / "tiny"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, pipeline: Path) -> Iterator[LocalCluster]:
    runpy.run_path(str(EXAMPLES / "diffusers_latents.py"))["write_tiny_pipeline"](pipeline)
    settings = {"QUIRE_DECODER_MODELS": f"{pipeline / 'vae'},{VAE_FOLDER}"}
    with LocalCluster(
        tmp_path_factory.mktemp("examples"), decoders=1, arena_bytes=128 << 20, settings=settings
    ) as running:
        yield running


def _run(name: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = fork_server.run(command, timeout=100, env=os.environ | environment, kind="torch")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_transformers(cluster: LocalCluster) -> None:
    first, second = _run("transformers_prefix.py", cluster.gateway_address).splitlines()
    assert first.startswith("0 tokens from Quire, 704 computed")
    assert second.startswith("640 tokens from Quire, 64 computed")


def test_diffusers(cluster: LocalCluster, pipeline: Path) -> None:
    """A pipeline of diffusers' own, of random weights: what comes back is what its VAE makes of its latents."""
    said = _run("diffusers_latents.py", cluster.gateway_address, str(pipeline), HF_HUB_OFFLINE="1")
    assert "bytes of PNG" in said
    assert (pipeline / "lighthouse.png").read_bytes().startswith(b"\x89PNG")


def test_s3(cluster: LocalCluster) -> None:
    async def make_key() -> tuple[str, str]:
        redis = connect(cluster.redis_url)
        keys = AccessKeys(redis, cluster.secret.encode())
        made = await keys.create("example", ())
        await redis.aclose()
        return made.name, keys.secret(made)

    name, secret = asyncio.run(make_key())
    said = _run("s3_objects.py", f"http://{cluster.s3_address}", AWS_ACCESS_KEY_ID=name, AWS_SECRET_ACCESS_KEY=secret)
    assert said.splitlines() == ["a range of it is right: True", "model/a.kv 1048576"]
