"""The policy that learns: least total stall on the curves that were measured, not on Eq. 4."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np

from quire_scheduler.core.curves import Array, Curves
from quire_scheduler.core.policies import StallOpt
from quire_scheduler.core.policy import Demand, Observation, Rates

_LEVELS: Final = 64
_FLOOR_SHARE: Final = 0.02
_EXACT_DEMANDS, _HULL_DEMANDS = 12, 128
_EXACT_UNITS, _EXACT_UNITS_MIN = 400, 100


class Adaptive:
    """Allocates on learned curves. A demand whose shape was never seen is treated as Calibrated Stall-opt does."""

    name = "adaptive"

    def __init__(self, margin: float, curves: Curves | None = None) -> None:
        self.curves = curves if curves is not None else Curves()
        self._safe = (StallOpt(), StallOpt(margin))

    def observe(self, observation: Observation) -> None:
        self.curves.observe(observation)

    def allocate(self, demands: Sequence[Demand], budget: float, effort: float = 1.0) -> Rates:
        """The best, as the curves predict, of the published allocations and the one found on the curves.

        Exact for a few demands, by convex hulls for some; of many only the published ones are compared.
        """
        published = [policy.allocate(demands, budget) for policy in self._safe]
        if not any(self.curves.known(demand) for demand in demands):
            return published[-1]
        candidates = [_with_rest(rates, budget) for rates in published]
        if len(demands) <= _EXACT_DEMANDS or len(demands) <= _HULL_DEMANDS * effort:
            candidates.insert(0, self._on_curves(demands, budget, effort))
        return min(candidates, key=lambda rates: self._expected(demands, rates))

    def _expected(self, demands: Sequence[Demand], rates: Rates) -> float:
        stalls = [self.curves.stall_s(demand, np.array([rate])) for demand, rate in zip(demands, rates, strict=True)]
        return float(np.sum(stalls))

    def _on_curves(self, demands: Sequence[Demand], budget: float, effort: float) -> Rates:
        if len(demands) <= _EXACT_DEMANDS:
            units = max(_EXACT_UNITS_MIN, int(_EXACT_UNITS * effort**0.5))
            grid = budget * np.arange(1, units + 1) / units
            return cheapest_on_grid([self.curves.stall_s(demand, grid) for demand in demands], budget)
        floor = _FLOOR_SHARE * budget / len(demands)
        grid = np.geomspace(floor, budget, _LEVELS)
        return cheapest_on_hulls(grid, [self.curves.stall_s(demand, grid) for demand in demands], budget)


def cheapest_on_grid(costs: Sequence[Array], budget: float) -> Rates:
    """Exact on a grid of equal units: cost_i[k] is that of k+1 units. Every demand gets at least one unit.

    Dynamic programming over demands, each step a min-plus convolution: O(n·K²). Curves need not be convex.
    """
    units = len(costs[0])
    best = np.concatenate(([np.inf], costs[0]))
    choices = []
    padded = np.full(2 * units + 1, np.inf)
    for cost in costs[1:]:
        padded[units:] = best
        # totals[k, j]: k+1 units for all so far, j+1 of them for this one
        windows = np.lib.stride_tricks.sliding_window_view(padded, units)[1 : units + 1, ::-1]
        totals = windows + cost
        choice = np.argmin(totals, axis=1)
        best = np.concatenate(([np.inf], totals[np.arange(units), choice]))
        choices.append(np.concatenate(([0], choice + 1)))
    left = int(np.argmin(best))
    counts = []
    for choice in reversed(choices):
        counts.append(int(choice[left]))
        left -= counts[-1]
    counts.append(left)
    return np.array(counts[::-1], dtype=np.float64) * budget / units


def cheapest_on_hulls(grid: Array, costs: Sequence[Array], budget: float) -> Rates:
    """For many demands: on the lower convex hull of each curve, what helps most per byte goes first. O(n·K).

    All but one demand end on a vertex of their hull, that is on their true curve.
    """
    rates = np.full(len(costs), grid[0])
    steps: list[tuple[float, int, float]] = []  # gain per byte per second, demand, size
    for index, cost in enumerate(costs):
        hull = _lower_hull(grid, cost)
        for low, high in itertools.pairwise(hull):
            size = grid[high] - grid[low]
            gain = (cost[low] - cost[high]) / size
            if gain > 0:
                steps.append((float(gain), index, float(size)))
    left = budget - float(rates.sum())
    for _, index, size in sorted(steps, key=lambda step: -step[0]):
        taken = min(size, left)
        rates[index] += taken
        left -= taken
        if left <= 0:
            break
    return rates


def _lower_hull(x: Array, y: Array) -> list[int]:
    """Indices of the vertices of the lower convex hull, left to right."""
    hull: list[int] = []
    for at in range(len(x)):
        while len(hull) > 1 and _above(x, y, hull[-2], hull[-1], at):
            hull.pop()
        hull.append(at)
    return hull


def _above(x: Array, y: Array, left: int, middle: int, right: int) -> bool:
    """Whether `middle` lies on or above the line from `left` to `right`."""
    rise, run = y[right] - y[left], x[right] - x[left]
    return bool((y[middle] - y[left]) * run >= rise * (x[middle] - x[left]))


def _with_rest(rates: Rates, budget: float) -> Rates:
    """`rates`, and what they leave of the budget in proportion to them."""
    return np.asarray(rates * max(1.0, budget / rates.sum()))
