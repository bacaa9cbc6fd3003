"""Names of an engine's blocks, by configurations of vLLM's own; no weights are loaded."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-engines` installs it")
from transformers import PaliGemmaConfig
from vllm.config import CacheConfig, KVTransferConfig, LoadConfig, LoRAConfig, ModelConfig, ParallelConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from quire.integrations.vllm.connector import QuireConnector, WorkerFormat
from quire.integrations.vllm.engine import check, engine_of, weights_of
from quire.integrations.vllm.groups import Group, Kind
from quire.integrations.vllm.naming import BlockFormat
from quire.integrations.vllm.offloading import QuireOffloadingConnector, _name_contents
from quire.integrations.vllm.settings import Settings
from quire.integrations.vllm.tier import TierSettings
from quire.model.errors import ConfigInvalid


class _Config:
    """The parts of a `VllmConfig` that name blocks."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.model_config = ModelConfig(model=str(folder), skip_tokenizer_init=True, tokenizer=str(folder), **settings)
        self.cache_config = CacheConfig(prefix_caching_hash_algo="sha256_cbor", enable_prefix_caching=True)
        self.load_config, self.parallel_config = LoadConfig(), ParallelConfig()
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


def test_a_tier_refuses_context_parallelism(folder: Path) -> None:
    """vLLM does not report to a tier how ranks divide a block: blocks of two divisions would have one name."""
    config = _Config(folder)
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    config.parallel_config = ParallelConfig(tensor_parallel_size=2, decode_context_parallel_size=2)
    with pytest.raises(ConfigInvalid, match="decode_context_parallel_size"):
        _name_contents(config)


def test_a_tier_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="QuireOffloadingConnector"):
        TierSettings(gateway="g:1")


def test_scales_that_differ_by_engine_are_refused(folder: Path) -> None:
    config: Any = _Config(folder)
    config.parallel_config = SimpleNamespace()
    transfer = SimpleNamespace(kv_load_failure_policy="recompute", kv_role="kv_both")
    settings = Settings(gateway="g:1")
    check(config, settings, transfer)
    config.cache_config.calculate_kv_scales = True
    with pytest.raises(ConfigInvalid, match="checkpoint"):
        check(config, settings, transfer)


def test_context_parallelism_of_prefills_is_refused(folder: Path) -> None:
    config: Any = _Config(folder)
    config.parallel_config = SimpleNamespace(prefill_context_parallel_size=2)
    transfer = SimpleNamespace(kv_load_failure_policy="recompute", kv_role="kv_both")
    with pytest.raises(ConfigInvalid, match="prefill_context_parallel_size"):
        check(config, Settings(gateway="g:1"), transfer)


@pytest.mark.parametrize(
    ("zero_copy", "sleeps", "refused"), [("async", True, True), ("never", True, False), ("always", False, False)]
)
def test_blocks_of_engines_that_sleep_are_not_written_to(
    folder: Path, zero_copy: str, sleeps: bool, refused: bool
) -> None:
    """Sleep mode unmaps the blocks, which stay registered: a node would write into memory that is not there."""
    config: Any = _Config(folder)
    config.parallel_config = SimpleNamespace()
    config.model_config.enable_sleep_mode = sleeps
    transfer = SimpleNamespace(kv_load_failure_policy="recompute", kv_role="kv_both")
    with pytest.raises(ConfigInvalid, match="sleep") if refused else contextlib.nullcontext():
        check(config, Settings(gateway="g:1", zero_copy=zero_copy), transfer)


def test_stages_of_a_pipeline_have_names_of_their_own(folder: Path) -> None:
    """Names follow the workers' ranks: by stage, then by shard. Shards of a stage share one copy of latents."""
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    names: list[Any] = []
    matching = SimpleNamespace(name=lambda spaces, direct, block_bytes: names.append((spaces, direct)))
    group = Group(0, ("layers.0",), Kind.FULL, 32, 4096)
    scheduler: Any = SimpleNamespace(
        _matching=matching, _vllm_config=_Config(folder), _settings=Settings(gateway="g:1"), _groups=[group]
    )

    def formats(stage: int, *, mla: bool) -> WorkerFormat:
        block = BlockFormat(
            group=f"full 0 layers.{2 * stage} layers.{2 * stage + 1}",
            kernel="FLASH",
            dtype="bfloat16",
            cache_dtype="auto",
            shape=(32, 64),
            strides=(64, 1),
            layers=2,
            kv_heads=1,
            head_dim=64 if mla else 32,
            block_tokens=32,
            kept_tokens=32,
            mla=mla,
            slab_bytes=32 * 64 * 2,
            page_bytes=32 * 64 * 2,
        )
        return WorkerFormat([block], True)

    for mla, different in ((False, 4), (True, 2)):
        ranks: Any = {(stage, rank): formats(stage, mla=mla) for rank in range(2) for stage in range(2)}
        QuireConnector.set_xfer_handshake_metadata_pp_aware(scheduler, ranks)
        ((spaces,), direct) = names[-1]
        assert len(spaces) == 4 and len(set(spaces)) == different and direct
        assert (spaces[0] == spaces[1]) is mla, "two shards of one stage"
        assert spaces[0] != spaces[2], "two stages"
