"""Every pair of UCX versions over TCP: what works is accepted, the rest is refused with both versions named.

`make test-ucx` installs the versions and names their folder in QUIRE_TEST_UCX.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Final

import pytest

from quire.transport.ucx import understands

_FOLDER: Final = os.environ.get("QUIRE_TEST_UCX", "")
_LIBRARIES: Final = sorted(Path(_FOLDER).glob("*/libucx/lib/libucp.so.0")) if _FOLDER else []
_LIMIT_S: Final = 60.0

pytestmark = pytest.mark.skipif(not _LIBRARIES, reason="make test-ucx installs the versions")


class Side:
    """A process with a version of UCX. `versions`: "any" to have it speak to every other one."""

    def __init__(self, role: str, library: Path, versions: str) -> None:
        settings = {"PYUCX_LIBUCP": str(library), "UCX_TLS": "tcp,self"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.versions.side", role, versions],
            env={**os.environ, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def read(self) -> list[str] | None:
        """Return its next line; None if it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line.startswith("[") else None

    def write(self, *facts: str) -> None:
        """Send it a line, if it has not ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(facts) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return

    def end(self) -> str:
        """Return its standard error, once it has ended."""
        try:
            _, errors = self.process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, errors = self.process.communicate()
        return errors


def version(library: Path) -> tuple[int, int]:
    major, minor = library.parents[2].name.split(".")[:2]
    return int(major), int(minor)


def exchange(libraries: Sequence[Path], versions: str) -> tuple[list[list[str] | None], str]:
    """Return the last lines of node and client, and their standard errors."""
    node, client = (Side(role, library, versions) for role, library in zip(("node", "client"), libraries, strict=True))
    try:
        node_address, memory = node.read(), client.read()
        assert node_address is not None and memory is not None, (node.end(), client.end())
        client.write(*node_address)
        node.write(*memory)
        words = [node.read()] if versions != "any" else [node.read(), client.read()]
    finally:
        for side in (node, client):
            side.write()
            if versions != "any":
                side.process.kill()
        errors = node.end() + client.end()
    return words, errors


@pytest.mark.parametrize(
    "pair",
    combinations_with_replacement(_LIBRARIES, 2),
    ids=lambda pair: " and ".join(library.parents[2].name for library in pair),
)
def test_a_pair_that_works_is_accepted(pair: tuple[Path, Path]) -> None:
    """Whichever of them is the node, which connects first."""
    endings = [exchange(libraries, "any") for libraries in (pair, pair[::-1])]
    works = all(words == [["verified"], ["sound"]] for words, _ in endings)
    older, newer = map(version, pair)
    assert works == understands(older, newer) == understands(newer, older), endings


def test_a_pair_that_does_not_work_is_refused_with_both_versions() -> None:
    oldest, newest = _LIBRARIES[0], _LIBRARIES[-1]
    words, errors = exchange((newest, oldest), "known")
    assert words == [None] and "TargetInvalid" in errors
    assert all(f"UCX {'.'.join(map(str, version(library)))}" in errors for library in (oldest, newest)), errors[-2000:]
