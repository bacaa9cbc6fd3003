"""A real vLLM in this process, and what is asked of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROMPT = [(at * 37) % 250 + 2 for at in range(1000)]
OTHER = [*PROMPT[:700], *([7] * 40)]
BLOCK = 32


class Engine:
    """`tokens` are greedy, so that equal prompts have equal answers."""

    def __init__(self, llm: Any, counted: dict[str, float]) -> None:
        self.llm = llm
        self._counted = counted

    def tokens(self, prompt: Sequence[int], count: int = 8) -> tuple[list[int], int]:
        """The next tokens, and how many of the prompt's were cached."""
        ((answer, cached),) = self.batch([prompt], count)
        return answer, cached

    def batch(self, prompts: Sequence[Sequence[int]], count: int = 8) -> list[tuple[list[int], int]]:
        """All at the same time."""
        from vllm import SamplingParams

        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        answers = self.llm.generate(asked, greedy, use_tqdm=False)
        return [(list(each.outputs[0].token_ids), each.num_cached_tokens) for each in answers]

    def forget(self, *, connector: bool = False) -> None:
        """vLLM's own prefix cache, and with `connector` what the connector knows."""
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

    def figures(self) -> dict[str, float]:
        """Of both halves, since this was last asked."""
        figures = dict(self._counted)
        self._counted.clear()
        return figures


@contextmanager
def engine(model: Path, gateway: str = "", extra: Mapping[str, Any] | None = None, **settings: Any) -> Iterator[Engine]:
    """Without a gateway vLLM alone, as reference."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = None
    if gateway:
        transfer = KVTransferConfig(
            kv_connector="QuireConnector",
            kv_connector_module_path="quire.integrations.vllm",
            kv_role="kv_both",
            kv_load_failure_policy=settings.pop("kv_load_failure_policy", "recompute"),
            # Which of the two is quicker is this machine's business: a test that asks for a load gets one.
            kv_connector_extra_config={"gateway": gateway, "cut_off": False, **(extra or {})},
        )
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
    counted: dict[str, float] = {}
    with _counting(counted):
        llm = LLM(model=str(model), **(arguments | settings))
        made = Engine(llm, counted)
        try:
            yield made
        finally:
            _stop(made, bool(gateway))


@contextmanager
def _counting(counted: dict[str, float]) -> Iterator[None]:
    """What the connector counts: vLLM takes its figures with every step."""
    from quire.integrations.vllm.connector import QuireConnector

    count = QuireConnector._count

    def both(self: Any, name: str, value: float) -> None:
        counted[name] = counted.get(name, 0) + value
        count(self, name, value)

    setattr(QuireConnector, "_count", both)  # noqa: B010
    try:
        yield
    finally:
        setattr(QuireConnector, "_count", count)  # noqa: B010


def _stop(made: Engine, connected: bool) -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    if connected:
        made.scheduler.shutdown()
        made.worker.shutdown()
    made.llm.llm_engine.engine_core.shutdown()
    del made.llm
    cleanup_dist_env_and_memory()


def until(condition: Callable[[], bool], what: str, timeout_s: float = 15.0) -> None:
    """Wait for what other threads do."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
