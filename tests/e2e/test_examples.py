"""The scripts in `examples/`, as their pages show them."""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire_decoder.adapters.weights import weights_digest
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


def _tutorial(language: str, heading: str) -> list[str]:
    """Its blocks of code under a heading."""
    part = (
        (EXAMPLES.parent / "docs" / "tutorial.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    )
    return re.findall(rf"^```{language}\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)


def test_the_tutorial(cluster: LocalCluster, tmp_path: Path) -> None:
    """Its program twice, then its commands, at this cluster's addresses."""
    (program,) = _tutorial("python", "Store a prefix and fetch it")
    script = tmp_path / "store.py"
    script.write_text(program.replace("127.0.0.1:7410", cluster.gateway_address))
    first, second = (fork_server.run([sys.executable, script], timeout=60).stdout.splitlines() for _ in range(2))
    assert first == ["cached 0 []", "stored 10 chunks"]
    assert second[0].startswith("cached 160 [") and second[0].count(",") == 3 and second[1] == "stored 0 chunks"

    make, put, get = _tutorial("", "A picture")
    here = f"--folder {cluster.folder}"
    put = put.replace("photo.png", f"photo.png {here} --weights {weights_digest(VAE_FOLDER)}")  # of this cluster's two
    put = put.replace("images ls", f"images ls {here}")
    commands = (make + put + get).replace("127.0.0.1:7480", cluster.http_address)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shell = ["bash", "-e", "-c", commands]
    done = subprocess.run(
        shell, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0 and "256 × 256" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "photo.webp").read_bytes()[8:12] == b"WEBP"


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
