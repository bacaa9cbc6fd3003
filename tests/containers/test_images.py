"""Images built twice, with no cache: `make test-images`. Skipped without QUIRE_TEST_BUILD."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BUILD = os.environ.get("QUIRE_TEST_BUILD", "")
ENGINE = os.environ.get("QUIRE_TEST_PODMAN", "") or "docker"
_BUILT_S = 3600
_BY_CONTENT = """
import pathlib
files = list(pathlib.Path("/opt/quire").rglob("*.pyc"))
print(len(files), [str(file) for file in files if file.read_bytes()[4] != 1])
"""
"""Prints how many modules are compiled, and which of them name the time of their source."""
pytestmark = pytest.mark.skipif(not BUILD, reason="QUIRE_TEST_BUILD names no command that builds an image")


def _built(name: str, target: str) -> dict[str, Any]:
    """Build a role's image; what the engine says of it."""
    command = [*shlex.split(BUILD), "--no-cache", "--target", target, "-t", name, "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_BUILT_S, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    command = [ENGINE, "image", "inspect", name]
    (about,) = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)
    return dict(about)


@pytest.mark.timeout(2 * _BUILT_S)
@pytest.mark.parametrize("target", os.environ.get("QUIRE_TEST_TARGETS", "storage decoder").split())
def test_an_image_built_again_has_the_same_bytes(target: str) -> None:
    first, second = (_built(f"quire-built-{which}", target) for which in ("first", "again"))
    assert first["RootFS"]["Layers"] == second["RootFS"]["Layers"], "each layer has the same files, with the same times"
    assert first["Config"] == second["Config"]
    command = [ENGINE, "run", "--rm", "--entrypoint", "python", "quire-built-again", "-c", _BY_CONTENT]
    output = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    count, by_time = output.split(maxsplit=1)
    assert int(count) > 1000 and by_time.strip() == "[]"
