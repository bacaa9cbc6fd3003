"""Figures for vLLM's log and its Prometheus page."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTED: Final = {
    "loaded_blocks": "blocks that were loaded from Quire",
    "failed_blocks": "blocks that were to be loaded and are recomputed",
    "recomputed_blocks": "blocks that Quire has and that were computed, because loading takes longer",
    "late_blocks": "blocks of loads that were given up, because the rest would have come later than computing it",
    "stored_blocks": "blocks that Quire has acknowledged",
    "unstored_blocks": "blocks that were not stored: no staging memory, or Quire was away",
    "lookups": "look-ups that were answered",
    "failed_lookups": "look-ups that failed, or took too long",
    "handovers": "requests whose prompt another engine has computed",
    "short_handovers": "of these those for which not all blocks came in time, so that the rest was computed here",
    "loads_s": "seconds that loads took, in all",
}


@dataclass
class QuireStats(KVConnectorStats):  # type: ignore[misc]
    """Sums since the last report; `data` has some of `COUNTED`."""

    data: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.data[name] = self.data.get(name, 0) + value

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> QuireStats:
        for name, value in other.data.items():
            self.add(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 3) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class QuirePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """A counter for each of `COUNTED`, as vllm:quire_NAME."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {}
        for name, text in COUNTED.items():
            counter = self._counter_cls(name=f"vllm:quire_{name}", documentation=text, labelnames=labelnames)
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
