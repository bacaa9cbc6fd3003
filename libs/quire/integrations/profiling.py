"""Measures the compute profile of a transformers model: prefill time by input length × prefix length."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from quire.model.errors import InvalidRequest
from quire.model.profile import ComputeProfile, Sample


def measure_profile(
    model: Any,
    name: str,
    device: str,
    inputs: Sequence[int],
    prefixes: Sequence[int],
    *,
    rounds: int = 3,
    progress: Callable[[], object] = lambda: None,
) -> ComputeProfile:
    """Medians of `rounds` forward passes of each input behind each prefix, on whatever device the model lies.

    `name`, `device`: under which look-ups find the profile. Random tokens. Raises `InvalidRequest`.
    """
    if not inputs or not prefixes or min(inputs) < 1 or min(prefixes) < 0 or rounds < 1:
        raise InvalidRequest(f"inputs {list(inputs)}, prefixes {list(prefixes)}, rounds {rounds}", field="inputs")
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and max(inputs) + max(prefixes) > limit:
        raise InvalidRequest(f"{max(inputs)} behind {max(prefixes)} tokens, the model takes {limit}", field="inputs")
    samples = []
    with torch.inference_mode():
        _forward(model, _tokens(model, min(inputs)), DynamicCache(config=model.config))
        for prefix in prefixes:
            filled = DynamicCache(config=model.config)
            if prefix:
                _forward(model, _tokens(model, prefix), filled)
            for length in inputs:
                times = sorted(_forward(model, _tokens(model, length), copy.deepcopy(filled)) for _ in range(rounds))
                samples.append(Sample(length, prefix, times[len(times) // 2]))
                progress()
    source = f"quire profile, torch {torch.__version__}, {rounds} rounds, {model.dtype}"
    return ComputeProfile(name, device, model.config.num_hidden_layers, source, tuple(samples))


def _tokens(model: Any, count: int) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (1, count), device=model.device)


def _forward(model: Any, tokens: torch.Tensor, cache: DynamicCache) -> float:
    """Seconds until the first new token's logits are there."""
    _wait(model)
    started = time.perf_counter()
    model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    _wait(model)
    return time.perf_counter() - started


def _wait(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
