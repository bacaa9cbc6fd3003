"""The learning policy: least total stall on measured curves, not on Eq. 4.

Where a curve was not measured it is only known to be monotone, so each allocation has a least and a most that it can
cost. While the curves are young, the policy tries the allocation of the least least: it is either good, or the curves
know better afterwards. Later it mostly takes that of the least most, and tries another every third time. A trial after
the first ten observations costs, at most, little more than the best published allocation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from quire_scheduler.core.curves import Array, Bounds, Curves
from quire_scheduler.core.policies import BwProp, Equal, KvProp, StallOpt
from quire_scheduler.core.policy import Demand, Observation, Rates

_LEVELS: Final = 64
_FLOOR_SHARE: Final = 0.02
_EXACT_DEMANDS, _HULL_DEMANDS = 12, 64
_EXACT_UNITS, _EXACT_UNITS_MIN = 400, 100
_BLENDS: Final = (0.0, 0.5, 1.0)
_FREE: Final = 10
_YOUNG: Final = 24
_TRIED_EVERY: Final = 3
_WORTH_TRYING: Final = 0.99
_DEARER_MAX: Final = 1.05


class Adaptive:
    """Allocates on learned curves. Shapes that were never seen are treated as Calibrated Stall-opt does."""

    name = "adaptive"

    def __init__(self, margin: float, curves: Curves | None = None) -> None:
        self.curves = curves if curves is not None else Curves()
        self._published = (StallOpt(margin), StallOpt(), Equal(), KvProp(), BwProp())

    def observe(self, observation: Observation) -> None:
        self.curves.observe(observation)

    def allocate(self, demands: Sequence[Demand], budget: float, effort: float = 1.0) -> Rates:
        """One of the published allocations or of those found on the curves, as the module says.

        Those are exact for a few demands, by convex hulls for some; of many only the published ones are compared.
        """
        published = [policy.allocate(demands, budget) for policy in self._published]
        samples = min((samples for demand in demands if (samples := self.curves.seen(demand))), default=0)
        if not samples:
            return published[0]
        candidates = [_with_rest(rates, budget) for rates in published]
        if len(demands) <= _EXACT_DEMANDS or len(demands) <= _HULL_DEMANDS * effort:
            candidates += self._on_curves(demands, budget, effort)
        least, expected, greatest = self._totals(demands, candidates)
        surest = int(np.argmin(greatest))
        if samples >= _YOUNG and samples % _TRIED_EVERY:
            return candidates[surest]
        bearable = math.inf if samples < _FREE else _DEARER_MAX * expected[: len(published)].min()
        hopeful = (least < _WORTH_TRYING * greatest[surest]) & (greatest <= bearable)
        return candidates[int(np.argmin(np.where(hopeful, least, np.inf))) if hopeful.any() else surest]

    def _totals(self, demands: Sequence[Demand], candidates: Sequence[Rates]) -> Bounds:
        """Return bounds of the stall of all demands, for each candidate."""
        columns = np.array(candidates).T
        bounds = [self.curves.bounds_s(demand, rates) for demand, rates in zip(demands, columns, strict=True)]
        return Bounds(*(np.sum(column, axis=0) for column in zip(*bounds, strict=True)))

    def _on_curves(self, demands: Sequence[Demand], budget: float, effort: float) -> list[Rates]:
        """The cheapest if each curve is as low as it can be, as high as it can be, or in the middle."""
        is_exact = len(demands) <= _EXACT_DEMANDS
        if is_exact:
            units = max(_EXACT_UNITS_MIN, int(_EXACT_UNITS * effort**0.5))
            grid = budget * np.arange(1, units + 1) / units
        else:
            grid = np.geomspace(_FLOOR_SHARE * budget / len(demands), budget, _LEVELS)
        bounds = [self.curves.bounds_s(demand, grid) for demand in demands]
        allocations = []
        for blend in _BLENDS:
            costs = [(1.0 - blend) * bound.least + blend * bound.most for bound in bounds]
            allocations.append(cheapest_on_grid(costs, budget) if is_exact else cheapest_on_hulls(grid, costs, budget))
        return allocations


def cheapest_on_grid(costs: Sequence[Array], budget: float) -> Rates:
    """Exact on a grid of equal units: cost_i[k] is that of k+1 units. Every demand gets at least one unit.

    Dynamic programming over demands, each step a min-plus convolution: O(n·K²). Curves need not be convex.
    """
    units = len(costs[0])
    best = np.concatenate(([np.inf], costs[0]))
    choices = []
    padded = np.full(2 * units + 1, np.inf)
    totals, rows = np.empty((units, units)), np.arange(units)
    for cost in costs[1:]:
        padded[units:] = best
        # totals[k, j]: k+1 units for all so far, units-j of them for this one; memory is read in its order
        windows = np.lib.stride_tricks.sliding_window_view(padded, units)[1 : units + 1]
        np.add(windows, cost[::-1].copy(), out=totals)
        at = np.argmin(totals, axis=1)
        best = np.concatenate(([np.inf], totals[rows, at]))
        choices.append(np.concatenate(([0], units - at)))
    chosen = int(np.argmin(best))
    counts = []
    for choice in reversed(choices):
        counts.append(int(choice[chosen]))
        chosen -= counts[-1]
    counts.append(chosen)
    return np.array(counts[::-1], dtype=np.float64) * budget / units


def cheapest_on_hulls(grid: Array, costs: Sequence[Array], budget: float) -> Rates:
    """Allocate for many demands: on the lower convex hull of each curve, the most helpful step per byte is first.

    O(n·K).

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
    remaining = budget - float(rates.sum())
    for _, index, size in sorted(steps, key=lambda step: -step[0]):
        taken = min(size, remaining)
        rates[index] += taken
        remaining -= taken
        if remaining <= 0:
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


def _above(x: Array, y: Array, low: int, middle: int, right: int) -> bool:
    """Whether `middle` is on or above the line from `low` to `right`."""
    rise, run = y[right] - y[low], x[right] - x[low]
    return bool((y[middle] - y[low]) * run >= rise * (x[middle] - x[low]))


def _with_rest(rates: Rates, budget: float) -> Rates:
    """Return `rates`, with the rest of the budget in proportion to them."""
    return np.asarray(rates * max(1.0, budget / rates.sum()))
