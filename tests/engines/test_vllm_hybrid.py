"""Real vLLM with models whose layers keep different parts of a prefix: tokens are those of vLLM alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from quire.model.errors import PeerLost
from quire_tools.bench.engines.vllm import make_model
from quire_tools.local import LocalCluster
from tests.engines.engine import BLOCK, OTHER, PROMPT, Engine, engine, until

WHOLE = (len(PROMPT) - 1) // BLOCK * BLOCK
WINDOW = 96
WINDOW_BLOCKS = 3
"""The last 95 tokens in front of the next one."""
PROMPTS = [PROMPT[: 300 + 64 * at] + [at + 3] * (20 + 7 * at) for at in range(8)]


def _mistral(folder: Path) -> Path:
    """A model all of whose layers have windows, with the tokenizer of the others."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    make_model(folder)
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        sliding_window=WINDOW,
        initializer_range=0.3,
    )
    MistralForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["gemma", "mistral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every second layer with a window (Gemma 3), and every layer (Mistral)."""
    folder = tmp_path_factory.mktemp(request.param)
    return make_model(folder, window=WINDOW) if request.param == "gemma" else _mistral(folder)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Any]:
    """By vLLM alone."""
    with engine(model) as alone:
        answers: dict[str, Any] = {"prompt": alone.tokens(PROMPT)[0], "other": alone.tokens(OTHER)[0]}
        answers["several"] = [answer for answer, _ in alone.batch(PROMPTS)]
        answers["long"] = alone.tokens(PROMPT, 80)[0]
    return answers


def _groups(quire: Engine) -> int:
    return len(quire.scheduler._groups)


def _stored(quire: Engine, tokens: int) -> None:
    """Wait until the blocks of so many tokens are acknowledged, in every group."""
    seen = [0.0]

    def there() -> bool:
        seen[0] += quire.figures().get("stored_blocks", 0)
        return seen[0] >= _groups(quire) * (tokens // BLOCK)

    until(there, f"{tokens} tokens stored")


def test_tokens_are_the_same_cold_and_warm_and_only_windows_are_loaded(
    model: Path, engine_cluster: LocalCluster, expected: dict[str, Any]
) -> None:
    gateway = engine_cluster.gateway_address
    with engine(model, gateway) as quire:
        full = _groups(quire) - 1
        assert full == ("gemma" in model.name)
        assert quire.tokens(PROMPT) == (expected["prompt"], 0)
        _stored(quire, WHOLE)
        for prompt, answer, cached in (
            (PROMPT, "prompt", WHOLE),
            (OTHER, "other", 700 // BLOCK * BLOCK),
            (PROMPT, "prompt", WHOLE),
        ):
            quire.forget()
            assert quire.tokens(prompt) == (expected[answer], cached)
            assert quire.figures()["loaded_blocks"] == full * cached // BLOCK + WINDOW_BLOCKS
        assert quire.tokens(PROMPT) == (expected["prompt"], WHOLE)
        assert "loaded_blocks" not in quire.figures(), "it was in vLLM's own cache"
    with engine(model, gateway) as other:
        assert other.tokens(PROMPT, 80) == (expected["long"], WHOLE)
        _stored(other, (len(PROMPT) + 79) // BLOCK * BLOCK - WHOLE)
        other.forget()
        assert other.tokens([*PROMPT, *expected["long"], 5, 6])[1] == (len(PROMPT) + 79) // BLOCK * BLOCK


def test_a_part_that_vllm_has_is_not_loaded(
    model: Path, engine_cluster: LocalCluster, expected: dict[str, Any]
) -> None:
    """Blocks of a window may begin in what vLLM has."""
    with engine(model, engine_cluster.gateway_address) as quire:
        assert quire.tokens(PROMPT) == (expected["prompt"], 0)
        _stored(quire, WHOLE)
        quire.forget()
        quire.tokens(PROMPT[: WHOLE - BLOCK + 1])
        quire.figures()
        assert quire.tokens(PROMPT) == (expected["prompt"], WHOLE)
        assert quire.figures()["loaded_blocks"] == _groups(quire), "one block more of each group"


def test_eight_at_once_while_both_caches_evict(model: Path, tmp_path: Path, expected: dict[str, Any]) -> None:
    small: dict[str, Any] = {"kv_cache_memory_bytes": 5 << 20, "max_num_batched_tokens": 256, "max_model_len": 1024}
    settings = {"QUIRE_STORAGE_SLAB_BYTES": str(1 << 20), "QUIRE_STORAGE_DRIVES": "", "QUIRE_STORAGE_OBJECT_URL": ""}
    with (
        LocalCluster(tmp_path / "cluster", arena_bytes=8 << 20, drive_bytes=8 << 20, settings=settings) as cluster,
        engine(model, cluster.gateway_address, **small) as quire,
    ):
        for _ in range(3):
            assert [answer for answer, _ in quire.batch(PROMPTS)] == expected["several"]
            quire.forget()


def test_a_node_killed_in_the_middle_costs_a_recompute(
    model: Path, engine_cluster: LocalCluster, expected: dict[str, Any]
) -> None:
    with engine(model, engine_cluster.gateway_address, {"timeout_s": 3.0}) as quire:
        assert quire.tokens(PROMPT)[0] == expected["prompt"]
        _stored(quire, WHOLE)
        quire.forget()
        start, killed = quire.worker._loads[0].start, list[int]()

        def kill_first(plan: Any) -> None:
            if not killed:
                killed.append(engine_cluster.pid("storage-0"))
                os.kill(killed[0], signal.SIGKILL)
            start(plan)

        quire.worker._loads[0].start = kill_first
        assert quire.tokens(PROMPT)[0] == expected["prompt"]
        assert killed and quire.figures()["failed_blocks"] > 0
        quire.forget()
        assert quire.tokens(OTHER)[0] == expected["other"], "and without a node it goes on"


@pytest.mark.parametrize("fault", [False, True])
def test_a_group_that_does_not_arrive_fails_the_load(
    model: Path, engine_cluster: LocalCluster, expected: dict[str, Any], fault: bool
) -> None:
    """The last group alone, the others arrive. `fault`: it is not reported, and the tokens are others."""
    with engine(model, engine_cluster.gateway_address) as quire:
        assert quire.tokens(PROMPT)[0] == expected["prompt"]
        _stored(quire, WHOLE)
        quire.forget()
        for loads in quire.worker._loads:
            for tensor in loads._blocks._tensors:
                tensor.zero_()
        last = quire.worker._loads[-1]

        async def lose(load: Any) -> set[int]:
            raise PeerLost("on purpose")

        deliver, received = last._deliver, last.received
        last._deliver = lose
        if fault:
            last.received = lambda: dict.fromkeys(received(), True)
            last.missing = set
        answer, _ = quire.tokens(PROMPT)
        assert (answer == expected["prompt"]) is not fault
        if fault:
            return
        assert quire.figures()["failed_blocks"] > 0
        last._deliver = deliver
        until(lambda: _loads_again(quire, expected["prompt"]), "what did not arrive is stored again", 30)


def test_the_fault_put_back_computes_behind_a_window_that_is_not_there(
    model: Path, engine_cluster: LocalCluster, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM is told which blocks failed, and computes from the first of these on: in front of it there is nothing."""
    if "mistral" not in model.name:
        pytest.skip("vLLM refuses it for several groups")
    monkeypatch.setattr("quire.integrations.vllm.connector.resumes_behind_failures", lambda groups: True)
    with engine(model, engine_cluster.gateway_address) as quire:
        assert quire.tokens(PROMPT)[0] == expected["prompt"]
        _stored(quire, WHOLE)
        quire.forget()

        async def lose(load: Any) -> set[int]:
            raise PeerLost("on purpose")

        quire.worker._loads[0]._deliver = lose
        assert quire.tokens(PROMPT)[0] != expected["prompt"]


def _loads_again(quire: Engine, answer: list[int]) -> bool:
    quire.forget()
    tokens, cached = quire.tokens(PROMPT)
    assert tokens == answer
    return cached == WHOLE
