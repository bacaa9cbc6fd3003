"""A real vLLM in this process on the CPU, and a model of random weights for it. For tests and benchmarks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from quire.model.errors import InvalidRequest

BLOCK: Final = 32
"""Tokens: the CPU's kernels want a multiple of it."""
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # more would spin against the cluster's processes
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def prepare() -> None:
    """Before vLLM is imported: one process, quiet, offline."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def require_vllm() -> str:
    """Prepare vLLM, and return its version. Raises `InvalidRequest` if it is not installed."""
    prepare()
    try:
        import vllm
    except ImportError:
        raise InvalidRequest(
            "vLLM is not installed here; `make test-engines` makes an environment that has it", field="engine"
        ) from None
    return str(vllm.__version__)


class Engine:
    """Greedy, so that equal prompts have equal answers."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def batch(
        self, prompts: Sequence[Sequence[int]], count: int = 8, *, lora: Any = None
    ) -> list[tuple[list[int], int]]:
        """Generate concurrently; return the next tokens of each prompt, and the number of its cached tokens.

        `lora`: vLLM's request for an adapter.
        """
        from vllm import SamplingParams

        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        answers = self.llm.generate(requests, greedy, use_tqdm=False, lora_request=lora)
        return [(list(answer.outputs[0].token_ids), answer.num_cached_tokens) for answer in answers]

    def tokens(self, prompt: Sequence[int], count: int = 8, *, lora: Any = None) -> tuple[list[int], int]:
        """Return the result of one prompt."""
        ((answer, cached),) = self.batch([prompt], count, lora=lora)
        return answer, cached

    def forget(self, *, connector: bool = False) -> None:
        """Forget vLLM's own prefix cache, and with `connector` what the connector knows."""
        assert self.llm.reset_prefix_cache(reset_connector=connector) is not False

    @property
    def scheduler(self) -> Any:
        """The connector's half there."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler.connector

    @property
    def worker(self) -> Any:
        """The connector's half in the worker."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()


@contextmanager
def vllm_engine(
    model: Path, gateway: str = "", extra: Mapping[str, Any] | None = None, **settings: Any
) -> Iterator[Engine]:
    """Start vLLM with Quire, or alone without a gateway.

    `extra`: kv_connector_extra_config; `settings`: of `vllm.LLM`.
    """
    from vllm.config import KVTransferConfig

    transfer = None
    if gateway:
        transfer = KVTransferConfig(
            kv_connector="QuireConnector",
            kv_connector_module_path="quire.integrations.vllm",
            kv_role=settings.pop("kv_role", "kv_both"),
            kv_load_failure_policy=settings.pop("kv_load_failure_policy", "recompute"),
            kv_connector_extra_config={"gateway": gateway, **(extra or {})},
        )
    with any_vllm(model, transfer, **settings) as engine:
        try:
            yield engine
        finally:
            if gateway:
                engine.scheduler.shutdown()
                engine.worker.shutdown()


@contextmanager
def any_vllm(model: Path, transfer: Any, **settings: Any) -> Iterator[Engine]:
    """Start vLLM with a `KVTransferConfig` of any kind, or None."""
    from vllm import LLM
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    _hide_llvmlite()
    arguments: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "block_size": BLOCK,
        "seed": 0,
        "disable_log_stats": True,
        "distributed_executor_backend": "uni",
        "kv_cache_memory_bytes": 64 << 20,
        "kv_transfer_config": transfer,
    }
    try:
        engine = Engine(LLM(model=str(model), **(arguments | settings)))
    except BaseException:  # a connector that refuses the model is not the next engine's
        with suppress(Exception):
            ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        raise
    try:
        yield engine
    finally:
        engine.llm.llm_engine.engine_core.shutdown()
        del engine.llm
        cleanup_dist_env_and_memory()


def _hide_llvmlite() -> None:
    """Hide llvmlite's values, which LMCache loads, from the CPU worker of vLLM 0.32, which fails at them."""
    from vllm.triton_utils import dispatcher

    rebind = dispatcher._rebind_kernels
    if hasattr(rebind, "without_llvmlite"):
        return

    def without_llvmlite(overrides: Any) -> None:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("llvmlite")}
        try:
            rebind(overrides)
        finally:
            sys.modules.update(hidden)

    setattr(without_llvmlite, "without_llvmlite", True)  # noqa: B010
    setattr(dispatcher, "_rebind_kernels", without_llvmlite)  # noqa: B010
