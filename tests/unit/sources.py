"""The repository's modules, each parsed once in a process."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]


def sources(*tops: str) -> Iterator[Path]:
    """Yield the modules under some folders, without those that are generated from `protos`."""
    for top in tops:
        yield from (path for path in sorted((ROOT / top).rglob("*.py")) if "v1" not in path.parts)


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return a module's syntax tree. Callers share it, and do not change it."""
    return ast.parse(path.read_text())
