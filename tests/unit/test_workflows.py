"""Workflows of the forge: they run what anybody can run, with pinned actions and few permissions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

WORKFLOWS = sorted((Path(__file__).resolve().parents[2] / ".github" / "workflows").glob("*.yml"))


def _steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_actions_are_pinned_and_permissions_are_named(file: Path) -> None:
    workflow = yaml.safe_load(file.read_text())
    actions = [step["uses"] for step in _steps(workflow) if "uses" in step]
    assert actions and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in actions)
    assert workflow["permissions"] in ({}, {"contents": "read"})
    assert all(job["timeout-minutes"] <= 60 for job in workflow["jobs"].values())


def test_ci_is_what_anybody_can_run() -> None:
    (ci,) = [file for file in WORKFLOWS if file.name == "ci.yml"]
    assert [step["run"] for step in _steps(yaml.safe_load(ci.read_text())) if "run" in step] == [".ci/run"]
