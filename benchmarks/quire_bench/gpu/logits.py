"""A transformer on the device whose prefix comes from Quire: the same bits as with KV that stayed on the device."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from quire.client import Client
from quire.integrations.transformers import PrefixCache
from quire.model.durability import Durability
from quire.model.errors import InternalError
from quire_bench.gpu.device import Device
from quire_tools.report import Row

_LAYERS, _PREFIX, _NEW = 4, 512, 65


def compare(client: Client, device: Device, dtype: torch.dtype) -> Row:
    """Raises `InternalError` where a logit differs in a bit."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        num_hidden_layers=_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1024,
        max_position_embeddings=2048,
    )
    model: Any = LlamaForCausalLM(config).eval().to(device=device.torch, dtype=dtype)
    first, tail = (torch.randint(0, 256, (1, count)).to(device.torch) for count in (_PREFIX, _NEW))
    longer = torch.cat([first, tail], dim=1)
    cache = PrefixCache(model, client, model_id=f"bench gpu {os.urandom(4).hex()}", durability=Durability.MEMORY)
    stored = cache.prefill(first)
    stored.wait_stored()
    reused = cache.prefill(longer, store=False)
    if reused.reused_tokens != _PREFIX or reused.failure:
        raise InternalError(f"{reused.reused_tokens} of {_PREFIX} tokens were used again: {reused.failure}")
    kept = DynamicCache()
    for layer in range(_LAYERS):
        mine = stored.cache.layers[layer]
        kept.update(mine.keys[:, :, :_PREFIX].clone(), mine.values[:, :, :_PREFIX].clone(), layer)
    with torch.inference_mode():
        expected = model(longer[:, _PREFIX:], past_key_values=kept, use_cache=True).logits
    cache.close()
    if not torch.equal(reused.logits, expected):
        raise InternalError(f"logits in {dtype} differ from those with KV kept on the device")
    figures = {"tokens from Quire": float(reused.reused_tokens), "bits that differ": 0.0}
    return Row({"part": "logits", "way": str(dtype).removeprefix("torch.")}, figures, 0.0, 1.0)
