"""What tests ask of a real vLLM: `quire_tools.engines.vllm`, with its connector's figures."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire_tools.engines import vllm
from quire_tools.engines.vllm import BLOCK, vllm_engine
from quire_tools.local import LocalCluster
from tests.polling import until

__all__ = ["BLOCK", "OTHER", "PROMPT", "Engine", "engine", "kill_at_first_load", "until"]

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
