"""The published policies (ObjectCache, §3.6 and §5.7): equal, KV-prop, BW-prop, Stall-opt, Calibrated Stall-opt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire_scheduler.core.curves import Curves
from quire_scheduler.core.policy import Demand, Observation, Rates


class _Unlearning:
    """A policy that learns nothing."""

    curves: Curves | None = None

    def observe(self, observation: Observation) -> None:
        del observation


class Equal(_Unlearning):
    """The same for all tenants."""

    name = "equal"

    def allocate(self, demands: Sequence[Demand], budget: float, effort: float = 1.0) -> Rates:
        return np.full(len(demands), budget / max(1, len(demands)))


class KvProp(_Unlearning):
    """Allocates in proportion to the bytes to be delivered (per layer: all have as many layers)."""

    name = "kv-prop"

    def allocate(self, demands: Sequence[Demand], budget: float, effort: float = 1.0) -> Rates:
        sizes = np.array([demand.bytes_per_layer for demand in demands], dtype=np.float64)
        return np.asarray(budget * sizes / sizes.sum())


class BwProp(_Unlearning):
    """Allocates in proportion to the zero-stall rates; one that is unknown counts as the budget."""

    name = "bw-prop"

    def allocate(self, demands: Sequence[Demand], budget: float, effort: float = 1.0) -> Rates:
        rates = _zero_stall(demands)
        rates[np.isinf(rates)] = budget
        return np.asarray(budget * rates / (rates.sum() or 1.0))


class StallOpt(_Unlearning):
    """Least total stall (Eq. 6), with targets r_i* + `margin` (Eq. 7); a margin of 0 is the uncalibrated policy."""

    def __init__(self, margin: float = 0.0) -> None:
        self.name = "calibrated" if margin else "stall-opt"
        self._margin = margin

    def allocate(self, demands: Sequence[Demand], budget: float, effort: float = 1.0) -> Rates:
        sizes = np.array([demand.bytes_per_layer for demand in demands], dtype=np.float64)
        return least_stall(sizes, _zero_stall(demands) + self._margin, budget)


def least_stall(sizes: Rates, caps: Rates, budget: float) -> Rates:
    """Minimise Σ s_i/r_i subject to Σ r_i ≤ `budget`, r_i ≤ cap_i: r_i = min(cap_i, λ√s_i), λ by the budget (Eq. 6).

    The optimality conditions say that all uncapped requests have the same s_i/r_i², hence r_i ∝ √s_i. With requests
    sorted by the λ at which they reach their cap, one pass finds how many do.
    """
    if caps.sum() <= budget:
        return caps.copy()
    roots = np.sqrt(sizes)
    order = np.argsort(caps / roots, kind="stable")
    finite = np.where(np.isfinite(caps), caps, 0.0)
    capped_before = np.concatenate(([0.0], np.cumsum(finite[order])[:-1]))
    roots_from = np.cumsum(roots[order][::-1])[::-1]
    levels = (budget - capped_before) / roots_from  # λ if all before are capped and no other
    first = int(np.argmax(levels <= caps[order] / roots[order]))
    return np.asarray(np.minimum(caps, levels[first] * roots))


def _zero_stall(demands: Sequence[Demand]) -> Rates:
    return np.array([demand.zero_stall_rate for demand in demands], dtype=np.float64)
