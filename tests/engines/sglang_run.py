"""One SGLang engine in processes of its own: python -m tests.engines.sglang_run MODEL SETTINGS, the latter as JSON.

Reads prompts from standard input, a JSON list of token ids on a line each; prints for each a JSON line: the next eight
tokens, and how many of the prompt's were cached. An empty line empties its caches.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    import sglang

    settings: dict[str, Any] = {
        "device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "disable_overlap_schedule": True,
        "max_total_tokens": 4096, "context_length": 2048, "page_size": 32, "log_level": "warning", "random_seed": 0,
    }  # fmt: skip
    engine = sglang.Engine(model_path=sys.argv[1], **(settings | json.loads(sys.argv[2])))
    print("ready", flush=True)
    for line in sys.stdin:
        if not line.strip():
            engine.flush_cache()
            print("{}", flush=True)
            continue
        greedy = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        try:
            answer = engine.generate(input_ids=json.loads(line), sampling_params=greedy)
            told = {"tokens": answer["output_ids"], "cached": answer["meta_info"]["cached_tokens"]}
        except Exception as error:
            told = {"error": repr(error)}
        print(json.dumps(told), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
