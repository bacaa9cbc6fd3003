"""A short run of the fuzzers: every input of the kept corpus, random changes of them, and some seconds of atheris."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest

from .targets import SEEDS, TARGETS

ROOT = Path(__file__).parents[2]
RUNS = 20_000  # the same ones each time; `make fuzz` explores


def _corpus(name: str) -> list[bytes]:
    kept = sorted((Path(__file__).parent / "corpus" / name).glob("*"))
    return [*SEEDS[name], *(file.read_bytes() for file in kept)]


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_and_what_is_near_it(name: str) -> None:
    rng, target = random.Random(1), TARGETS[name]
    assert all(map(target, SEEDS[name])), "a target that refuses everything sees nothing"
    for data in _corpus(name):
        target(data)
        for _ in range(50):
            changed = bytearray(data)
            for _ in range(rng.randint(1, 4)):
                at = rng.randrange(len(changed) + 1)
                match rng.randrange(3):
                    case 0:
                        changed[at : at + 1] = bytes([rng.randrange(256)])
                    case 1:
                        del changed[at : at + rng.randint(1, 8)]
                    case _:
                        changed[at:at] = changed[: rng.randint(1, 16)]
            target(bytes(changed))


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
@pytest.mark.parametrize("name", TARGETS)
def test_coverage_guided(name: str, tmp_path: Path) -> None:
    """On a copy of the corpus, so that a test run changes no file of the repository."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, data in enumerate(_corpus(name)):
        (corpus / str(number)).write_bytes(data)
    options = [f"-runs={RUNS}", "-seed=1", f"-artifact_prefix={tmp_path}/"]
    command = [sys.executable, "-m", "tests.fuzz.run", name, str(corpus), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
