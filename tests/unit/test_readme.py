"""The README's table of variables is that of the code."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

from quire.config import variable_name

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
CONFIGS = {
    "quire_orchestrator": "OrchestratorConfig",
    "quire_gateway": "GatewayConfig",
    "quire_storage": "StorageConfig",
    "quire_scheduler": "SchedulerConfig",
    "quire_decoder": "DecoderConfig",
}


def test_every_variable_is_in_the_readme_and_no_other() -> None:
    """Name, default and meaning of each stand in the README as they do in the config classes."""
    expected = set()
    for package, name in CONFIGS.items():
        module = importlib.import_module(f"{package}.config")
        for field in dataclasses.fields(getattr(module, name)):
            default = f"`{field.default}` " if field.default != "" else ""
            expected.add(f"| `{variable_name(module.PREFIX, field)}` | {default}| {field.metadata['doc']} |")
    found = {line for line in README.splitlines() if line.startswith("| `QUIRE_")}
    assert found == expected
