"""A stranger's first hour: the programs and commands of the front page and the tutorial, as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from quire_tools.local import LocalCluster
from quire_tools.local.pictures import pictures
from tests import fork_server

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """As `quire up` makes it: its decoder has one VAE, Quire's own."""
    with LocalCluster(tmp_path_factory.mktemp("hour"), decoders=1, arena_bytes=128 << 20) as running:
        yield running


def _blocks(page: str, language: str, heading: str) -> list[str]:
    """Return the blocks of code of a page under a heading."""
    part = (ROOT / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)


def test_the_front_pages_program(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = _blocks("README.md", "python", "Use it")
    assert len(program.splitlines()) <= 12
    monkeypatch.chdir(tmp_path)
    Image.fromarray(pictures(1)[0]).save("cat.png")
    layers = torch.randn(32, 2, 48, 8, 128).to(torch.bfloat16)
    names = {"tokens": list(range(48)), "layers": list(layers)}
    program = program.replace("127.0.0.1:7410", cluster.gateway_address)
    seen: list[torch.Tensor] = []
    exec(program.replace("print(keys.shape)", "seen.append(keys)"), names | {"seen": seen})
    assert len(seen) == 32
    assert torch.equal(seen[7].reshape(48, 8, 128), layers[7, 0])
    with Image.open("cat.webp") as picture:
        assert picture.format == "WEBP"


def test_the_tutorial(cluster: LocalCluster, tmp_path: Path) -> None:
    """Its program twice, then its commands, at this cluster's addresses."""
    (program,) = _blocks("docs/tutorial.md", "python", "Store a prefix and fetch it")
    assert len(program.splitlines()) <= 12
    script = tmp_path / "store.py"
    script.write_text(program.replace("127.0.0.1:7410", cluster.gateway_address))
    first, second = (fork_server.run([sys.executable, script], timeout=60).stdout.splitlines() for _ in range(2))
    assert first == ["cached 0 []", "stored 10 chunks"]
    sums = [float(number) for number in second[0].removeprefix("cached 160 [").rstrip("]").split(",")]
    layers = np.random.default_rng(0).standard_normal((4, 2, 160, 2, 64)).astype(np.float16)
    assert np.allclose(sums, [float(keys.sum()) for keys, _ in layers], rtol=0.05, atol=2.0), "they are the keys'"
    assert second[1] == "stored 0 chunks"

    make, put, get = _blocks("docs/tutorial.md", "sh", "A picture")
    here = f"--folder {cluster.folder}"
    put = put.replace("images put photo.png", f"images put photo.png {here}").replace("images ls", f"images ls {here}")
    commands = (make + put + get).replace("127.0.0.1:7480", cluster.http_address)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    shell = ["bash", "-e", "-c", commands]
    done = subprocess.run(shell, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "256 × 256" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "photo.webp").read_bytes()[8:12] == b"WEBP"
