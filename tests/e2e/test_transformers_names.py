"""States of a transformers model are those of its weights and configuration, also when these change in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from quire.client import Client
from quire.integrations import transformers
from quire.integrations.transformers import PrefixCache
from quire.model.errors import ConfigInvalid
from quire.model.urgency import Urgency
from quire_tools.local import LocalCluster
from tests.e2e.small_model import VOCABULARY, small_model

IDS = torch.randint(0, VOCABULARY, (1, 100), generator=torch.Generator().manual_seed(9))
REUSED = 96


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with (
        LocalCluster(tmp_path_factory.mktemp("names"), arena_bytes=128 << 20) as cluster,
        Client(cluster.gateway_address) as client,
    ):
        yield client


def _right(model: Any, cache: PrefixCache, reused: int) -> None:
    prefill = cache.prefill(IDS)
    with torch.inference_mode():
        logits = model(IDS).logits[0, -1]
    assert prefill.reused_tokens == reused
    torch.testing.assert_close(prefill.logits[0, -1], logits, atol=1e-4, rtol=1e-4)
    prefill.wait_stored()


def _by_torch(model: Any) -> None:
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(1.5)


def _past_torch(model: Any) -> None:
    for weights in model.parameters():
        weights.data.mul_(1.5)


def _one_tensor(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[3, 3] += 0.5


def _positions(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


@pytest.mark.parametrize("change", [_by_torch, _past_torch, _one_tensor, _positions])
def test_weights_that_change_in_place_have_other_states(client: Client, change: Callable[[Any], None]) -> None:
    """A step of training, an adapter that is merged: the cache lives on."""
    model = small_model()
    cache = PrefixCache(model, client, model_id=f"in place {change.__name__}")
    _right(model, cache, 0)
    _right(model, cache, REUSED)
    first = cache.namespace
    change(model)
    _right(model, cache, 0)
    _right(model, cache, REUSED)
    assert cache.namespace != first


def test_the_fault_put_back_gives_states_of_old_weights(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "weights_mark", lambda model: ())
    model = small_model()
    cache = PrefixCache(model, client, model_id="fault")
    cache.prefill(IDS).wait_stored()
    _by_torch(model)
    with pytest.raises(AssertionError, match="not close"):
        _right(model, cache, REUSED)


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}},
        {"rms_norm_eps": 0.5},
    ],
    ids=["theta", "yarn", "linear", "norm"],
)
def test_another_configuration_has_other_states(client: Client, settings: dict[str, Any]) -> None:
    """The weights are the same."""
    plain, changed = small_model(), small_model(**settings)
    PrefixCache(plain, client, model_id="configuration").prefill(IDS).wait_stored()
    _right(changed, PrefixCache(changed, client, model_id="configuration"), 0)
    _right(plain, PrefixCache(plain, client, model_id="configuration"), REUSED)


def test_positions_that_depend_on_the_prompt_are_refused(client: Client) -> None:
    """A prefix has other keys in each prompt."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    with pytest.raises(ConfigInvalid, match="length of a prompt"):
        PrefixCache(small_model(rope_parameters=rope), client, model_id="dynamic")


def test_a_prefill_tells_for_how_long_layers_compute(client: Client) -> None:
    """The window follows from the times of earlier prefills, three at least."""
    model = small_model()
    cache = PrefixCache(model, client, model_id="windows")
    assert cache._window_us(4) == 0
    for seed in range(4):
        cache.prefill(torch.randint(0, VOCABULARY, (1, 64), generator=torch.Generator().manual_seed(seed)))
    windows, fetch = [], client.fetch

    def noted(*arguments: Any, urgency: Urgency, **named: Any) -> Any:
        windows.append(urgency.compute_window_us)
        return fetch(*arguments, urgency=urgency, **named)

    client.fetch = noted  # type: ignore[method-assign,assignment]
    try:
        _right(model, cache, 0)
        _right(model, cache, REUSED)
    finally:
        client.fetch = fetch  # type: ignore[method-assign]
    assert len(windows) == 1 and windows[0]


def test_the_scaling_of_adapters_is_in_the_name() -> None:
    """PEFT stores it apart from the weights (lora_alpha / r), and changes it in place."""
    model = small_model()
    layer = model.model.layers[0].self_attn.q_proj
    layer.active_adapters, layer.scaling = ["legal"], {"legal": 2.0}
    first = transformers.contents_digest(model), transformers.weights_mark(model)
    layer.scaling["legal"] = 1.0
    assert transformers.contents_digest(model) != first[0] and transformers.weights_mark(model) != first[1]
