"""The examples in docstrings, run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

LIBS = Path(__file__).resolve().parents[2] / "libs"
MODULES = [
    ".".join(file.relative_to(LIBS).with_suffix("").parts)
    for file in sorted((LIBS / "quire").rglob("*.py"))
    if "    >>> " in file.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_do_what_they_say(name: str) -> None:
    tried = doctest.testmod(importlib.import_module(name))
    assert tried.attempted and not tried.failed


def test_there_are_some() -> None:
    assert {"quire.model.hashing", "quire.model.keys", "quire.model.layout"} <= set(MODULES)
