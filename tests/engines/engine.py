"""What tests ask of a real vLLM: `quire_tools.engines.vllm`, with its connector's figures."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire_tools.engines import vllm
from quire_tools.engines.vllm import BLOCK, any_vllm, vllm_engine
from quire_tools.local import LocalCluster
from tests.polling import until

__all__ = [
    "BLOCK",
    "OTHER",
    "PROMPT",
    "Engine",
    "engine",
    "kill_at_first_load",
    "settle",
    "tier_of",
    "tiered_engine",
    "until",
]

PROMPT = [(at * 37) % 250 + 2 for at in range(1000)]
OTHER = [*PROMPT[:700], *([7] * 40)]


class Engine(vllm.Engine):
    """One whose connector's figures are kept."""

    def __init__(self, llm: Any, counted: dict[str, float]) -> None:
        super().__init__(llm)
        self._counted = counted

    def figures(self) -> dict[str, float]:
        """Of both halves, since this was last asked."""
        figures = dict(self._counted)
        self._counted.clear()
        return figures


@contextmanager
def engine(model: Path, gateway: str = "", extra: Mapping[str, Any] | None = None, **settings: Any) -> Iterator[Engine]:
    """Without a gateway vLLM alone, as reference."""
    from quire.integrations.vllm.connector import QuireConnector

    counted: dict[str, float] = {}
    count = QuireConnector._count

    def both(self: Any, name: str, value: float) -> None:
        """vLLM takes its figures with every step."""
        counted[name] = counted.get(name, 0) + value
        count(self, name, value)

    setattr(QuireConnector, "_count", both)  # noqa: B010
    try:
        # Which of the two is quicker is this machine's business: a test that asks for a load gets one.
        with vllm_engine(model, gateway, {"cut_off": False, **(extra or {})}, **settings) as made:
            yield Engine(made.llm, counted)
    finally:
        setattr(QuireConnector, "_count", count)  # noqa: B010


def kill_at_first_load(quire: Engine, cluster: LocalCluster) -> list[int]:
    """Kill the storage node when the first load begins; the list has its process number from then on."""
    loads, killed = quire.worker._loads[0], list[int]()
    start = loads.start

    def kill_first(plan: Any) -> None:
        if not killed:
            killed.append(cluster.pid("storage-0"))
            os.kill(killed[0], signal.SIGKILL)
        start(plan)

    loads.start = kill_first
    return killed


@contextmanager
def tiered_engine(
    model: Path, gateway: str, rows: int = 256, engine_settings: dict[str, Any] | None = None, **params: Any
) -> Iterator[Engine]:
    """Run vLLM with a memory tier of `rows` chunks, and Quire under it."""
    from vllm.config import KVTransferConfig

    tier = {"type": "QuireTier", "module_path": "quire.integrations.vllm.tier", "gateway": gateway, **params}
    transfer = KVTransferConfig(
        kv_connector="QuireOffloadingConnector",
        kv_connector_module_path="quire.integrations.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.engines.cpu_tiering",
            "cpu_bytes_to_use": rows * BLOCK * 4 * 2 * 2 * 32 * 4,
            "block_size": BLOCK,
            "secondary_tiers": [tier],
        },
    )
    with any_vllm(model, transfer, **(engine_settings or {})) as vllm_with_tier:
        try:
            yield Engine(vllm_with_tier.llm, {})
        finally:
            vllm_with_tier.scheduler.shutdown()
            vllm_with_tier.worker.shutdown()


def tier_of(tiered: Engine) -> Any:
    return tiered.scheduler.connector_scheduler.manager.secondary_tiers[0]


def settle(tiered: Engine) -> None:
    """Wait for the stores, which vLLM takes note of in its next step."""
    tiered.tokens([9] * 5, 2)
    tier_of(tiered).drain_jobs()
    tiered.tokens([8] * 5, 2)
