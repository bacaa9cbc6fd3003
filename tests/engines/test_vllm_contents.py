"""Real vLLM with adapters: tokens are those of vLLM alone with the same files, whatever was cached under the name.

By QuireConnector, and by vLLM's own offloading with Quire as its tier.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from quire.integrations.vllm.contents import ContentNames
from quire_tools.engines.models import make_adapter
from quire_tools.local import LocalCluster
from tests.engines.engine import BLOCK, PROMPT, engine, settle, tiered_engine
from tests.polling import until

WHOLE = (len(PROMPT) - 1) // BLOCK * BLOCK
LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


def _request(folder: Path, number: int = 1) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("legal", number, str(folder))


@pytest.fixture(scope="module")
def expected(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[int]]:
    """The answers of vLLM alone: without an adapter, and with those of each seed."""
    folders = {seed: make_adapter(tmp_path_factory.mktemp(f"seed{seed}"), seed) for seed in (1, 2)}
    with engine(tiny_model, **LORA) as alone:
        answers: dict[Any, list[int]] = {None: alone.tokens(PROMPT)[0]}
        for seed, folder in folders.items():
            answers[seed] = alone.tokens(PROMPT, lora=_request(folder, seed))[0]
    assert len(set(map(tuple, answers.values()))) == 3, "adapters make a difference here"
    return answers


def test_an_adapter_that_was_trained_again_gives_its_own_tokens(
    tiny_model: Path, engine_cluster: LocalCluster, expected: dict[Any, list[int]], tmp_path: Path
) -> None:
    """vLLM's hash has the name and the path, which stay: another engine got the tokens of the old weights."""
    folder = make_adapter(tmp_path / "adapter", 1)
    stored = [0.0]
    with engine(tiny_model, engine_cluster.gateway_address, **LORA) as quire:

        def there() -> bool:
            stored[0] += quire.figures().get("stored_blocks", 0)
            return stored[0] >= 2 * (WHOLE // BLOCK)

        assert quire.tokens(PROMPT) == (expected[None], 0)
        assert quire.tokens(PROMPT, lora=_request(folder)) == (expected[1], 0), "nothing of the model without it"
        until(there, "all blocks stored")
        quire.forget()
        assert quire.tokens(PROMPT, lora=_request(folder)) == (expected[1], WHOLE)
        assert quire.tokens(PROMPT) == (expected[None], WHOLE)
    for seed, cached in ((2, 0), (1, WHOLE)):
        make_adapter(folder, seed)
        with engine(tiny_model, engine_cluster.gateway_address, **LORA) as quire:
            assert quire.tokens(PROMPT, lora=_request(folder)) == (expected[seed], cached)


def test_an_adapter_that_changes_under_an_engine_is_left_alone(
    tiny_model: Path, engine_cluster: LocalCluster, expected: dict[Any, list[int]], tmp_path: Path
) -> None:
    """vLLM goes on with the weights that it has, and loads the new ones whenever it evicted these."""
    folder = make_adapter(tmp_path / "adapter", 1)
    with engine(tiny_model, engine_cluster.gateway_address, **LORA) as quire:
        assert quire.tokens(PROMPT[:20], lora=_request(folder))[1] == 0, "the worker has loaded it"
        make_adapter(folder, 2)
        assert quire.tokens(PROMPT, lora=_request(folder))[0] == expected[1]
        assert quire.llm.llm_engine.remove_lora(1)
        quire.forget()
        assert quire.tokens(PROMPT, lora=_request(folder)) == (expected[2], 0)
    for seed in (2, 1):
        shutil.rmtree(folder)
        make_adapter(folder, seed)
        with engine(tiny_model, engine_cluster.gateway_address, **LORA) as quire:
            assert quire.tokens(PROMPT, lora=_request(folder)) == (expected[seed], 0), "nothing was stored"


def test_the_fault_put_back_gives_tokens_of_old_weights(
    tiny_model: Path,
    engine_cluster: LocalCluster,
    expected: dict[Any, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An adapter that is named by its name is one for all of its contents."""
    monkeypatch.setattr(ContentNames, "adapter", lambda self, lora: lora.lora_name)
    monkeypatch.setattr(ContentNames, "is_current", lambda self, request, contents: True)
    folder = tmp_path / "adapter"
    for _ in range(2):
        make_adapter(folder, 1)
        with engine(tiny_model, engine_cluster.gateway_address, **LORA) as quire:
            assert quire.tokens(PROMPT, lora=_request(folder))[0] == expected[1]
    make_adapter(folder, 2)
    with engine(tiny_model, engine_cluster.gateway_address, **LORA) as quire:
        answer, cached = quire.tokens(PROMPT, lora=_request(folder))
        assert cached == WHOLE and answer != expected[2]


def test_a_tier_names_an_adapter_by_its_files(
    tiny_model: Path, engine_cluster: LocalCluster, expected: dict[Any, list[int]], tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    for seed, cached in ((1, 0), (1, WHOLE), (2, 0), (1, WHOLE)):
        make_adapter(folder, seed)
        with tiered_engine(tiny_model, engine_cluster.gateway_address, engine_settings=LORA) as quire:
            assert quire.tokens(PROMPT, lora=_request(folder)) == (expected[seed], cached)
            settle(quire)
    with tiered_engine(tiny_model, engine_cluster.gateway_address, engine_settings=LORA) as quire:
        assert quire.tokens(PROMPT) == (expected[None], 0), "nothing of the adapter without it"


def test_a_tier_leaves_an_adapter_alone_that_changes_under_its_engine(
    tiny_model: Path, engine_cluster: LocalCluster, expected: dict[Any, list[int]], tmp_path: Path
) -> None:
    """Also what vLLM keeps in its memory tier under the name and the path: these stay."""
    folder = make_adapter(tmp_path / "adapter", 1)
    with tiered_engine(tiny_model, engine_cluster.gateway_address, engine_settings=LORA) as quire:
        assert quire.tokens(PROMPT[:20], lora=_request(folder))[1] == 0, "the worker has loaded it"
        make_adapter(folder, 2)
        assert quire.tokens(PROMPT, lora=_request(folder))[0] == expected[1]
        settle(quire)
        assert quire.llm.llm_engine.remove_lora(1)
        quire.forget()
        assert quire.tokens(PROMPT, lora=_request(folder)) == (expected[2], 0)
    for seed in (2, 1):
        shutil.rmtree(folder)
        make_adapter(folder, seed)
        with tiered_engine(tiny_model, engine_cluster.gateway_address, engine_settings=LORA) as quire:
            assert quire.tokens(PROMPT, lora=_request(folder)) == (expected[seed], 0), "nothing was stored"


def test_the_fault_put_back_gives_a_tier_tokens_of_old_weights(
    tiny_model: Path,
    engine_cluster: LocalCluster,
    expected: dict[Any, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tier whose chunks have vLLM's names alone, as before."""
    from quire.integrations.vllm import tier

    monkeypatch.setattr(tier, "_adapter_of", lambda req_context: None)
    folder = tmp_path / "adapter"
    for seed in (1, 2):
        make_adapter(folder, seed)
        with tiered_engine(tiny_model, engine_cluster.gateway_address, engine_settings=LORA) as quire:
            answer, cached = quire.tokens(PROMPT, lora=_request(folder))
            settle(quire)
    assert cached == WHOLE and answer != expected[2]
