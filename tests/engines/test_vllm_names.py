"""Names of an engine's blocks, by configurations of vLLM's own; no weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-engines` installs it")
from transformers import PaliGemmaConfig
from vllm.config import CacheConfig, KVTransferConfig, LoadConfig, LoRAConfig, ModelConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from quire.integrations.vllm.engine import engine_of, weights_of
from quire.integrations.vllm.offloading import QuireOffloadingConnector, _name_contents
from quire.integrations.vllm.tier import TierSettings
from quire.model.errors import ConfigInvalid


class _Config:
    """The parts of a `VllmConfig` that name blocks."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.model_config = ModelConfig(model=str(folder), skip_tokenizer_init=True, tokenizer=str(folder), **settings)
        self.cache_config = CacheConfig(prefix_caching_hash_algo="sha256_cbor", enable_prefix_caching=True)
        self.load_config = LoadConfig()
        self.lora_config: LoRAConfig | None = None
        tiers = [{"type": "QuireTier", "gateway": "g:1"}, {"type": "fs"}]
        self.kv_transfer_config = KVTransferConfig(kv_connector_extra_config={"secondary_tiers": tiers})

    @property
    def tiers(self) -> list[dict[str, Any]]:
        tiers: list[dict[str, Any]] = self.kv_transfer_config.kv_connector_extra_config["secondary_tiers"]
        return tiers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that sees images."""
    size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = PaliGemmaConfig(
        text_config={**size, "model_type": "gemma", "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128},
        vision_config={**size, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
        projection_dim=64,
        architectures=["PaliGemmaForConditionalGeneration"],
    )
    config.save_pretrained(tmp_path)
    processor = {"image_processor_type": "SiglipImageProcessor", "image_mean": [0.5, 0.5, 0.5]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    return tmp_path


def test_a_changed_processor_names_other_blocks(folder: Path) -> None:
    """The same image gave the answer of the processor before, across engines and restarts."""
    first = engine_of(_Config(folder))
    assert engine_of(_Config(folder)) == first
    assert engine_of(_Config(folder, mm_processor_kwargs={"do_normalize": False})) != first
    processor = folder / "preprocessor_config.json"
    processor.write_text(processor.read_text().replace("0.5", "0.4"))
    assert engine_of(_Config(folder)) != first


def test_the_longest_sequence_names_no_blocks(folder: Path) -> None:
    assert engine_of(_Config(folder, max_model_len=512)) == engine_of(_Config(folder, max_model_len=1024))


def test_a_model_without_weights_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigInvalid, match="no weights"):
        weights_of(_Config(folder).model_config)


def test_a_tier_refuses_adapters(folder: Path) -> None:
    """vLLM names their blocks by the adapter's name: one that was trained again gave the tokens of the old weights."""
    config: Any = _Config(folder)
    config.lora_config = LoRAConfig()
    with pytest.raises(ConfigInvalid, match="adapters"):
        QuireOffloadingConnector(config, KVConnectorRole.SCHEDULER)


@pytest.mark.parametrize("trust", [True, False])
def test_a_tier_is_named_by_contents(folder: Path, trust: bool) -> None:
    """And by the engine's start, unless clients' identifiers of images are trusted."""
    weights = folder / "pytorch_model.bin"
    names = []
    for content in (b"first" * 100, b"first" * 100, b"again" * 100):
        weights.write_bytes(content)
        config = _Config(folder)
        config.tiers[0]["trust_image_ids"] = trust
        _name_contents(config)
        assert "contents" not in config.tiers[1], "another's tier"
        names.append(config.tiers[0]["contents"])
    assert (names[0] == names[1]) is trust
    assert names[1] != names[2]


def test_a_tier_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="QuireOffloadingConnector"):
        TierSettings(gateway="g:1")
