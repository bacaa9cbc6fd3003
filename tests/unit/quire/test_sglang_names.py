"""Names of an SGLang's pages: the same weights have other states with other positions."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.integrations.sglang.naming import configuration_of

PLAIN: dict[str, Any] = {"model_type": "llama", "rope_theta": 10000.0, "_name_or_path": "somewhere"}
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    return tmp_path


def _args(overrides: dict[str, Any] | None = None, context: int | None = None) -> Any:
    return SimpleNamespace(json_model_override_args=json.dumps(overrides or {}), context_length=context)


def test_positions_are_in_the_name(folder: Path) -> None:
    plain = configuration_of(str(folder), _args())
    assert configuration_of(str(folder), None) == plain
    assert configuration_of(str(folder), _args(YARN)) != plain, "by an argument of the server"
    (folder / "config.json").write_text(json.dumps(PLAIN | YARN))
    assert configuration_of(str(folder), _args()) == configuration_of(str(folder), _args(YARN))


def test_the_longest_context_counts_where_positions_depend_on_it(folder: Path) -> None:
    assert configuration_of(str(folder), _args(context=4096)) == configuration_of(str(folder), _args())
    lengths = [configuration_of(str(folder), _args(DYNAMIC, context)) for context in (4096, 8192)]
    assert lengths[0] != lengths[1]


def test_a_model_of_a_hub_has_its_overrides_alone() -> None:
    assert configuration_of("org/model", _args(YARN))["config"] == YARN
