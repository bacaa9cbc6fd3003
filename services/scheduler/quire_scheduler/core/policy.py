"""Allocation policies: demands in, bytes per second out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from quire.model.policy import WEIGHT_MAX, WEIGHT_MIN
from quire.model.urgency import PRIORITY_MAX
from quire_scheduler.errors import DemandInvalid

if TYPE_CHECKING:
    from quire_scheduler.core.curves import Curves

Rates = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Demand:
    """A layerwise delivery: s_i bytes per layer, c_i seconds of compute per layer (None for unknown).

    `weight` and `cap_bytes_per_s` (0 for none) are its tenant's. `priority`: among the deliveries of its tenant.
    See ObjectCache, §3.6. Raises `DemandInvalid`.
    """

    delivery: str
    bytes_per_layer: int
    compute_window_s: float | None
    layers_left: int
    tenant: str = ""
    weight: float = 1.0
    cap_bytes_per_s: int = 0
    priority: int = 0

    def __post_init__(self) -> None:
        if not self.delivery:
            raise DemandInvalid("must not be empty", field="delivery")
        for name in ("bytes_per_layer", "layers_left", "weight"):
            value = getattr(self, name)
            if not (0 < value < math.inf):
                raise DemandInvalid(f"{value} is not positive and finite", field=name)
        if not WEIGHT_MIN <= self.weight <= WEIGHT_MAX:
            raise DemandInvalid(f"{self.weight} is not within {WEIGHT_MIN}..{WEIGHT_MAX}", field="weight")
        if self.compute_window_s is not None and not (0 < self.compute_window_s < math.inf):
            raise DemandInvalid(f"{self.compute_window_s} is not positive and finite", field="compute_window_s")
        if self.cap_bytes_per_s < 0:
            raise DemandInvalid(f"{self.cap_bytes_per_s} is negative", field="cap_bytes_per_s")
        if not -PRIORITY_MAX <= self.priority <= PRIORITY_MAX:
            raise DemandInvalid(f"{self.priority} is not in -{PRIORITY_MAX}..{PRIORITY_MAX}", field="priority")

    @property
    def zero_stall_rate(self) -> float:
        """r_i* = s_i / c_i in bytes per second; infinite where the window is unknown."""
        return math.inf if self.compute_window_s is None else self.bytes_per_layer / self.compute_window_s


@dataclass(frozen=True, slots=True)
class Observation:
    """Result of a rate: seconds for which the client waited for layers, over a whole delivery."""

    tenant: str
    bytes_per_layer: int
    compute_window_s: float
    layers: int
    rate_bytes_per_s: float
    stall_s: float

    def __post_init__(self) -> None:
        for name in ("bytes_per_layer", "compute_window_s", "layers", "rate_bytes_per_s"):
            value = getattr(self, name)
            if not (0 < value < math.inf):
                raise DemandInvalid(f"{value} is not positive and finite", field=name)
        if not (0 <= self.stall_s < math.inf):
            raise DemandInvalid(f"{self.stall_s} is not a duration", field="stall_s")


class Policy(Protocol):
    """Shares a budget among demands. `curves`: the learned ones, None if it does not learn."""

    name: str

    @property
    def curves(self) -> Curves | None: ...

    def allocate(self, demands: Sequence[Demand], budget: float, effort: float = 1.0) -> Rates:
        """A rate for each demand, in bytes per second; together at most the budget.

        `effort`: the part that this call has of the time for all tenants.
        """

    def observe(self, observation: Observation) -> None:
        """Learn from a finished delivery, if the policy learns."""
