"""A real Llama-architecture model with random weights: KV from Quire gives the logits that KV from memory gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from quire.client import Client
from quire.integrations.transformers import Prefill, PrefixCache
from quire.model.errors import InvalidRequest
from quire.model.hashing import block_keys
from quire_tools.local import LocalCluster
from tests.e2e.small_model import LAYERS, small_model


def prompt(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 97, (1, length), generator=torch.Generator().manual_seed(seed))


def from_memory(model: Any, source: Prefill, ids: torch.Tensor, prefix: int) -> torch.Tensor:
    """Logits of ids[prefix:] behind the first `prefix` positions of another prefill's own cache."""
    memory = DynamicCache()
    for layer in range(LAYERS):
        kept = source.cache.layers[layer]
        memory.update(kept.keys[:, :, :prefix].clone(), kept.values[:, :, :prefix].clone(), layer)
    with torch.inference_mode():
        logits: torch.Tensor = model(ids[:, prefix:], past_key_values=memory, use_cache=True).logits
    return logits


def recompute(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(ids).logits
    return logits


@pytest.fixture(scope="module", params=[1, 3], ids=["1 node", "3 nodes"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("model")
    with LocalCluster(folder, storage_nodes=request.param, arena_bytes=128 << 20) as cluster:
        yield cluster


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [600, 599, 16, 15], ids=["chunk end", "inside a chunk", "one chunk", "miss"])
def test_logits_are_bit_identical_to_kv_in_memory(running: LocalCluster, shared: int, dtype: torch.dtype) -> None:
    """For prefixes that end at a chunk, inside of one, and for a miss: the same bits as with KV kept in memory."""
    model = small_model(dtype)
    first = prompt(640, seed=shared)
    second = torch.cat([first[:, :shared], (first[:, shared : shared + 1] + 1) % 97, prompt(50, seed=9)], dim=1)
    with Client(running.gateway_address) as client:
        cache = PrefixCache(model, client, model_id=f"test-{shared}")
        stored = cache.prefill(first)
        assert stored.reused_tokens == 0 and stored.wait_stored() == 40
        reused = cache.prefill(second)
        assert reused.reused_tokens == shared // 16 * 16 and not reused.failure
        assert torch.equal(reused.logits, from_memory(model, stored, second, reused.reused_tokens))
        tail = recompute(model, second)[:, reused.reused_tokens :]
        assert torch.allclose(reused.logits.float(), tail.float(), atol=1e-4 if dtype is torch.float32 else 0.1)
        cache.close()


def test_the_same_prompt_again_computes_one_token(running: LocalCluster) -> None:
    """A prompt that is cached whole still leaves its last token to the model, which needs its logits."""
    model, ids = small_model(), prompt(320, seed=77)
    with Client(running.gateway_address) as client:
        cache = PrefixCache(model, client, model_id="again")
        stored = cache.prefill(ids)
        stored.wait_stored()
        again = cache.prefill(ids)
        assert (again.matched_tokens, again.reused_tokens, again.computed_tokens) == (320, 319, 1)
        assert torch.equal(again.logits, from_memory(model, stored, ids, 319))


def test_a_batch_or_no_prompt_is_refused(running: LocalCluster) -> None:
    """The first row of a batch was stored, and a second run failed inside."""
    model, ids = small_model(), prompt(320, seed=78)
    with Client(running.gateway_address) as client:
        cache = PrefixCache(model, client, model_id="batches")
        for refused in (ids.repeat(2, 1), ids[0], ids[:, :0]):
            with pytest.raises(InvalidRequest, match="one prompt"):
                cache.prefill(refused)
        assert cache.prefill(ids).matched_tokens == 0, "nothing was stored"
        cache.close()


def test_decoding_continues_from_a_delivered_prefix(running: LocalCluster) -> None:
    """The returned cache is an ordinary cache: greedy tokens equal those of a plain run."""
    model, ids = small_model(), prompt(200, seed=5)
    with Client(running.gateway_address) as client:
        cache = PrefixCache(model, client, model_id="decode")
        cache.prefill(ids).wait_stored()
        result = cache.prefill(ids)
        token, got = result.logits[:, -1:].argmax(-1), []
        for _ in range(5):
            got.append(int(token))
            with torch.inference_mode():
                token = model(token, past_key_values=result.cache, use_cache=True).logits[:, -1:].argmax(-1)
        plain = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None)[0, 200:].tolist()
        assert got == plain


@pytest.mark.slow
def test_reuse_across_restarts_of_every_process(tmp_path: Path) -> None:
    """Stored before, reused after everything (Redis included) was stopped and started again."""
    model, ids = small_model(), prompt(400, seed=1)
    longer = torch.cat([ids, prompt(30, seed=2)], dim=1)
    with (
        LocalCluster(tmp_path, storage_nodes=3, arena_bytes=64 << 20) as cluster,
        Client(cluster.gateway_address) as client,
    ):
        stored = PrefixCache(model, client, model_id="m").prefill(ids)
        stored.wait_stored()
    with (
        LocalCluster(tmp_path, storage_nodes=3, arena_bytes=64 << 20) as cluster,
        Client(cluster.gateway_address) as client,
    ):
        reused = PrefixCache(model, client, model_id="m").prefill(longer)
        assert reused.reused_tokens == 400
        assert torch.equal(reused.logits, from_memory(model, stored, longer, 400))


def test_failures_cost_a_recompute_and_never_a_wrong_token(tmp_path: Path) -> None:
    """A storage node lost after the look-up's promise, then a whole cluster lost: the logits stay right."""
    model, ids = small_model(), prompt(900, seed=4)
    expected = recompute(model, ids)
    no_objects = {"QUIRE_STORAGE_OBJECT_URL": ""}  # else the other node would have the chunks from there
    cluster = LocalCluster(tmp_path, storage_nodes=2, arena_bytes=64 << 20, settings=no_objects)
    with cluster, Client(cluster.gateway_address) as client:
        cache = PrefixCache(model, client, model_id="m")
        cache.prefill(ids).wait_stored()
        keys = block_keys(cache.namespace, ids[0].tolist())
        cluster.kill(client.lookup(cache.namespace, keys, lease_ttl_ms=0).ranges[0].node_id)
        survived = cache.prefill(ids, store=False)
        assert survived.failure or survived.matched_tokens == 0
        assert torch.allclose(survived.logits[:, -1], expected[:, -1], atol=1e-4)
        cluster.kill("gateway")
        alone = cache.prefill(ids)
        assert alone.failure and alone.reused_tokens == 0 and alone.store is None
        assert torch.allclose(alone.logits, expected, atol=1e-4)
