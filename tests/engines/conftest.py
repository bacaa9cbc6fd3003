"""Real engines on this machine's CPU; skipped where they are not installed (`make test-engines` installs them)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire_tools.local import LocalCluster

# Before vLLM is imported: one process, quiet, offline, no threads that spin against the cluster's.
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    VLLM_LOGGING_LEVEL="WARNING",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say once, and in words, why nothing runs."""
    try:
        import vllm  # noqa: F401
    except ImportError:
        reason = "vLLM is not installed here: `make test-engines` installs it in an environment of its own"
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights with a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        initializer_range=0.3,  # so that what is attended to decides the next token
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    vocabulary = {"<s>": 0, "</s>": 1}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<s>")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def engine_cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster of one storage node, for tests that break it as they like."""
    with LocalCluster(tmp_path / "cluster", decoders=0, arena_bytes=128 << 20, drive_bytes=128 << 20) as cluster:
        yield cluster
