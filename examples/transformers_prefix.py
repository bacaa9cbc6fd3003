"""Two prompts with the same beginning: the second takes its prefix from Quire while the model runs.

python examples/transformers_prefix.py 127.0.0.1:7410 [MODEL]

MODEL: a name or a folder; by default a small Llama of random weights.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from quire.client import Client
from quire.integrations.transformers import PrefixCache


def random_llama() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2
    )
    return LlamaForCausalLM(config).eval()


def main(gateway: str, name: str = "") -> None:
    model = AutoModelForCausalLM.from_pretrained(name).eval() if name else random_llama()
    draw = torch.Generator().manual_seed(5)
    shared = torch.randint(0, 256, (1, 640), generator=draw)
    endings = [torch.randint(0, 256, (1, 64), generator=draw) for _ in range(2)]
    with Client(gateway) as client:
        cache = PrefixCache(model, client, model_id=name or "random-llama")
        for ending in endings:
            result = cache.prefill(torch.cat([shared, ending], dim=1))
            print(
                f"{result.reused_tokens} tokens from Quire, {result.computed_tokens} computed, "
                f"first token after {result.ttft_s * 1e3:.0f} ms"
            )
            result.wait_stored()
        cache.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
