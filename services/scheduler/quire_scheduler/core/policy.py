"""Allocation policies: demands in, bytes per second out. The Bandwidth policies of the paper come behind this port."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire_scheduler.errors import DemandInvalid


@dataclass(frozen=True, slots=True)
class Demand:
    """A layerwise delivery: s_i bytes per layer, c_i seconds of compute per layer (0 for unknown).

    See ObjectCache, §3.6. Raises `DemandInvalid`.
    """

    delivery: str
    bytes_per_layer: int
    compute_window_s: float
    layers_left: int
    tenant: str = ""
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.delivery:
            raise DemandInvalid("must not be empty", field="delivery")
        for name in ("bytes_per_layer", "layers_left", "weight"):
            if getattr(self, name) <= 0:
                raise DemandInvalid(f"{getattr(self, name)} is not positive", field=name)
        if self.compute_window_s < 0:
            raise DemandInvalid(f"{self.compute_window_s} is negative", field="compute_window_s")


class Policy(Protocol):
    """Shares a budget among demands."""

    def __call__(self, demands: Sequence[Demand], budget_bytes_per_s: int) -> list[int]:
        """A rate for each demand, in bytes per second; together at most the budget."""


def equal_share(demands: Sequence[Demand], budget_bytes_per_s: int) -> list[int]:
    """The same for everybody."""
    return [budget_bytes_per_s // len(demands)] * len(demands) if demands else []
