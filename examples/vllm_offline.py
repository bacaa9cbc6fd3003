"""vLLM with Quire, in one process. Run it twice: the second time the prompt's prefix comes from Quire.

python examples/vllm_offline.py MODEL 127.0.0.1:7410
"""

import sys
import time

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig


def main(model: str, gateway: str) -> None:
    llm = LLM(
        model=model,
        prefix_caching_hash_algo="sha256_cbor",
        kv_transfer_config=KVTransferConfig(
            kv_connector="QuireConnector",
            kv_connector_module_path="quire.integrations.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"gateway": gateway},
        ),
    )
    text = "Quire keeps what was computed once. " * 40
    began = time.perf_counter()
    (answer,) = llm.generate([text], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    took_ms = (time.perf_counter() - began) * 1e3
    print(f"{answer.num_cached_tokens} of {len(answer.prompt_token_ids)} tokens cached; {took_ms:.0f} ms")
    time.sleep(2)  # blocks are stored beside the engine's work


if __name__ == "__main__":
    main(*sys.argv[1:])
