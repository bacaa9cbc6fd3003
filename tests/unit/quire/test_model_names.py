"""Names of models that change with their contents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.integrations.weights import processor_digest, rope_depends_on_length, weights_name
from quire.model.errors import ConfigInvalid


def test_a_file_is_named_by_its_content(tmp_path: Path) -> None:
    model = tmp_path / "model.Q4_K_M.gguf"
    model.write_bytes(b"x" * 4096)
    first = weights_name(str(model), None)
    model.write_bytes(b"x" * 4095 + b"y")
    assert weights_name(str(model), None) != first


def test_a_model_of_a_hub_is_named_by_its_commit() -> None:
    assert weights_name("org/model", "1234") != weights_name("org/model", "5678")
    with pytest.raises(ConfigInvalid, match="commit of org/model is not known"):
        weights_name("org/model", None)


@pytest.mark.parametrize("name", ["preprocessor_config.json", "video_preprocessor_config.json", "modeling.py"])
def test_a_changed_processor_is_another_one(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert processor_digest(str(tmp_path)) == ""
    (tmp_path / name).write_text('{"image_mean": 0.5}')
    first = processor_digest(str(tmp_path))
    (tmp_path / name).write_text('{"image_mean": 0.4}')
    assert processor_digest(str(tmp_path)) not in ("", first)
    assert processor_digest("org/model") == "", "its commit names these files"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, False),
        ({"rope_scaling": None, "rope_theta": 1e6}, False),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, False),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, True),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, True),
        ({"text_config": {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}}, True),
        ({"rope_scaling": {"rope_type": "of next year", "factor": 1.0}}, True),
        ({"model_type": "llama", "type": "llama"}, False),
    ],
)
def test_which_positions_depend_on_the_longest_sequence(config: dict[str, Any], expected: bool) -> None:
    assert rope_depends_on_length(config) is expected
