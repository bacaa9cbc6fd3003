"""Models of random weights for a real vLLM, one of each kind of state that layers keep."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from quire.model.errors import InvalidRequest

_VOCABULARY: Final = 512


def make_model(
    folder: Path,
    *,
    family: str = "llama",
    layers: int = 4,
    hidden: int = 256,
    heads: int = 8,
    kv_heads: int = 2,
    context: int = 4096,
    window: int = 96,
) -> Path:
    """Write a model of random weights with a tokenizer of bytes.

    Args:
        folder: Where to write it.
        family: One of `FAMILIES`.
        layers: Number of layers; in hybrid families every second one has full attention.
        hidden: Width.
        heads: Attention heads.
        kv_heads: Heads of keys and values.
        context: Longest sequence, tokens.
        window: Tokens that layers with sliding windows read.

    Raises:
        InvalidRequest: The family is unknown.
    """
    import torch

    if family not in FAMILIES:
        raise InvalidRequest(f"{family!r}; {', '.join(FAMILIES)}", field="model")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": context,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,  # so that the tokens in the window decide the next one
    }
    model = FAMILIES[family](sizes, window)
    model.to(getattr(torch, dtype_of(family))).save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def make_adapter(folder: Path, seed: int, *, layers: int = 4, hidden: int = 256, kv_width: int = 64) -> Path:
    """Write a LoRA adapter of random weights for a model of `make_model`, as PEFT does.

    Args:
        folder: Where to write it.
        seed: Decides the weights.
        layers: Number of layers of the model.
        hidden: Its width.
        kv_width: Width of its keys.
    """
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "task_type": "CAUSAL_LM"}))
    random, weights = torch.Generator().manual_seed(seed), {}
    for layer in range(layers):
        for name, width in (("q_proj", hidden), ("v_proj", kv_width)):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = 0.3 * torch.randn(8, hidden, generator=random)
            weights[f"{module}.lora_B.weight"] = 0.3 * torch.randn(width, 8, generator=random)
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def dtype_of(family: str) -> str:
    """Return the dtype in which the CPU has kernels for a family."""
    return "bfloat16" if family == "qwen3-next" else "float32"


def settings_of(family: str) -> dict[str, Any]:
    """Return settings of `vllm.LLM` that a family needs. vLLM caches no prefixes of models with states by default."""
    return {"dtype": dtype_of(family), **({"enable_prefix_caching": True} if family == "qwen3-next" else {})}


def _llama(sizes: dict[str, Any], window: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    del window
    return LlamaForCausalLM(LlamaConfig(**sizes))


def _mixtral(sizes: dict[str, Any], window: int) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    del window
    return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, sliding_window=None))


def _mistral(sizes: dict[str, Any], window: int) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**sizes, sliding_window=window))


def _gemma3(sizes: dict[str, Any], window: int) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = _every_second(sizes, "sliding_attention")
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, sliding_window=window, layer_types=kinds, pad_token_id=0))


def _gpt_oss(sizes: dict[str, Any], window: int) -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    sizes = sizes | {"intermediate_size": sizes["hidden_size"]}
    kinds = _every_second(sizes, "sliding_attention")
    return GptOssForCausalLM(GptOssConfig(**sizes, **experts, sliding_window=window, layer_types=kinds))


def _qwen3_next(sizes: dict[str, Any], window: int) -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    del window
    config = Qwen3NextConfig(
        **(sizes | {"num_key_value_heads": sizes["num_attention_heads"]}),
        layer_types=_every_second(sizes, "linear_attention"),
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
    )
    return Qwen3NextForCausalLM(config)


FAMILIES: Final[dict[str, Callable[[dict[str, Any], int], Any]]] = {
    "llama": _llama,
    "mixtral": _mixtral,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "qwen3-next": _qwen3_next,
}


def _every_second(sizes: dict[str, Any], kind: str) -> list[str]:
    return ["full_attention" if layer % 2 else kind for layer in range(sizes["num_hidden_layers"])]


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "</s>": 1}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<s>")
    fast.save_pretrained(folder)
