"""The Lua scripts of Redis: all of them are files of one folder, and each file is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire_server.redis import scripts

LIBRARY = Path(scripts.__file__).parent
FILES = {file.stem for file in (LIBRARY / "lua").iterdir()}


def test_every_file_is_a_script_or_shared_by_some() -> None:
    shared = {part for parts in scripts._SHARED.values() for part in parts}
    assert scripts._SHARED.keys() | shared == FILES and not scripts._SHARED.keys() & shared


def test_no_script_stands_in_a_module() -> None:
    """Redis' commands in Python are method calls, not text."""
    services = LIBRARY.parents[2] / "services"
    modules = [file for top in (LIBRARY.parents[1], services) for file in top.rglob("*.py")]
    assert len(modules) > 100
    assert [file for file in modules if "redis.call(" in file.read_text()] == []


@pytest.mark.parametrize(
    "area", ["index", "s3", "images", "membership", "leader", "retained", "reservations", "decodes"]
)
def test_an_area_has_its_scripts(area: str) -> None:
    for name in scripts.names(area):
        assert scripts.part(f"{area}_{name}") in scripts.script(f"{area}_{name}")
