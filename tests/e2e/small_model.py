"""A Llama of random weights for transformers."""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS: Final = 3
VOCABULARY: Final = 97


def small_model(dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Make the model; the same weights with other `settings` of its configuration."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=2048,
        **settings,
    )
    return LlamaForCausalLM(config).eval().to(dtype)
