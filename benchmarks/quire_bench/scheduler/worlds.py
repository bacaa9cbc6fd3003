"""What a policy that learns is tried on: links whose stall curves are known, and a game of rounds on each.

The curves are monotone and of many forms, convex or not: the paper's measurements read in four ways, and five random
families. A policy is told the stalls of what it allocated, as they are or with noise, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from quire_bench.scheduler.workloads import GBPS, PaperMeasurements, Workload
from quire_scheduler.core.adaptive import cheapest_on_grid
from quire_scheduler.core.curves import Array, monotone
from quire_scheduler.core.factory import POLICIES, make_policy
from quire_scheduler.core.policy import Demand, Observation, Policy, Rates

_LAYERS: Final = 32
_OPTIMUM_UNITS: Final = 600
_SAME_RATE: Final = 1.05
_MARGIN_SHARE: Final = 0.05
FAMILIES: Final = ("knees", "pieces", "smooth", "steps", "concave")
FIRST, SETTLED, ROUNDS = 10, 30, 60
"""The rounds in which anything may be tried; those before an allocation is judged; all."""
_NEGLIGIBLE: Final = 0.002

Slowdown = Callable[[Array], Array]
"""y of u, in the units of `quire_scheduler.core.curves`."""


@dataclass(frozen=True, slots=True)
class World:
    """Requests that come together again and again over one link, and how much each is really slowed."""

    name: str
    demands: tuple[Demand, ...]
    budget: float
    margin: float
    slowdowns: tuple[Slowdown, ...]

    def stalls_s(self, at: int, rates: Array) -> Array:
        """Of demand `at`, over all its layers."""
        demand = self.demands[at]
        u = demand.zero_stall_rate / np.asarray(rates, dtype=np.float64)
        return np.asarray(demand.layers_left * _window_s(demand) * self.slowdowns[at](u))

    def total_s(self, rates: Rates) -> float:
        """Return the stall of all demands.

        An imperceptible stall, 0.2% of all windows, is added, so that ratios of totals near 0 count for little.
        """
        negligible = _NEGLIGIBLE * sum(each.layers_left * _window_s(each) for each in self.demands)
        return negligible + sum(float(self.stalls_s(at, rates[at : at + 1])[0]) for at in range(len(self.demands)))

    def least_s(self) -> float:
        """The total of the optimum, by exact search in 600 equal units."""
        grid = self.budget * np.arange(1, _OPTIMUM_UNITS + 1) / _OPTIMUM_UNITS
        costs = [self.stalls_s(at, grid) for at in range(len(self.demands))]
        return self.total_s(cheapest_on_grid(costs, self.budget))

    def published_s(self) -> float:
        """The total of the best published policy."""
        policies = [make_policy(name, self.margin) for name in POLICIES if name != "adaptive"]
        return min(self.total_s(policy.allocate(self.demands, self.budget)) for policy in policies)


@dataclass(frozen=True, slots=True)
class Game:
    """How a policy did.

    `settled`: its median round after 30 over the optimum; `dearest`: its worst after 10 over the best published policy.
    """

    world: str
    settled: float
    dearest: float


def play(world: World, policy: Policy, noise: float = 0.0, seed: int = 0) -> Game:
    """Sixty rounds. `noise`: standard deviation of what is told of a stall, relative to it."""
    rng, totals = np.random.default_rng(seed), []
    for _ in range(ROUNDS):
        rates = policy.allocate(world.demands, world.budget)
        if rates.sum() > world.budget * (1 + 1e-9):
            raise ValueError(f"{rates.sum()} was granted of {world.budget}")
        totals.append(world.total_s(rates))
        for at, demand in enumerate(world.demands):
            stall = float(world.stalls_s(at, rates[at : at + 1])[0]) * max(0.0, rng.normal(1.0, noise))
            told = (demand.bytes_per_layer, _window_s(demand), demand.layers_left, float(rates[at]), stall)
            policy.observe(Observation(demand.tenant, *told))
    settled = float(np.median(totals[SETTLED:])) / world.least_s()
    return Game(world.name, settled, max(totals[FIRST:]) / world.published_s())


def _window_s(demand: Demand) -> float:
    assert demand.compute_window_s is not None
    return demand.compute_window_s


def readings() -> list[World]:
    """The paper's three workloads on its measurements, averaged or isotonic, linear in the rate or in its inverse."""
    paper = PaperMeasurements()
    return [
        _reading(paper, workload, isotonic=isotonic, inverse=inverse)
        for workload in paper.workloads
        for isotonic in (True, False)
        for inverse in (True, False)
    ]


def _reading(paper: PaperMeasurements, workload: Workload, *, isotonic: bool, inverse: bool) -> World:
    slowdowns = []
    for request in workload.requests:
        demand = request.demand()
        seconds_per_byte, ttft_ms = paper.measured(request.name)
        group = monotone if isotonic else _averaged
        x, y = group(seconds_per_byte, ttft_ms / 1e3, np.ones(len(ttft_ms)))
        slowdowns.append(partial(_read, x, y, demand, inverse))
    name = f"{workload.name}, {'isotonic' if isotonic else 'averaged'}, linear in {'1/rate' if inverse else 'the rate'}"
    margin = paper.margin_gbps * GBPS
    return World(name, tuple(workload.demands), workload.budget, margin, tuple(slowdowns))


def _read(x: Array, y: Array, demand: Demand, inverse: bool, u: Array) -> Array:
    asked = u * _window_s(demand) / demand.bytes_per_layer
    between = np.interp(asked, x, y) if inverse else np.interp(1.0 / asked, 1.0 / x[::-1], y[::-1])
    beyond = np.maximum(0.0, asked - x[-1]) * demand.layers_left * demand.bytes_per_layer
    return np.asarray((between + beyond - y[0]) / (demand.layers_left * _window_s(demand)))


def _averaged(x: Array, y: Array, weights: Array) -> tuple[Array, Array]:
    """What was measured at rates within 5% is one point; a faster rate is taken to be no slower."""
    order = np.argsort(x, kind="stable")
    x, y, weights = x[order], y[order], weights[order]
    starts = [0]
    for at in range(1, len(x)):
        if x[at] >= _SAME_RATE * x[starts[-1]]:
            starts.append(at)
    total = np.add.reduceat(weights, starts)
    means = np.add.reduceat(y * weights, starts) / total
    return np.add.reduceat(x * weights, starts) / total, np.maximum.accumulate(means)


def made_up(family: str, seed: int) -> World:
    """Two to six requests of one of `FAMILIES`, on a link of 0.4 to 1.1 of what they want."""
    rng = np.random.default_rng(seed)
    demands = []
    for at in range(int(rng.integers(2, 7))):
        size, window_s = int(rng.uniform(3e7, 3e8)), float(np.exp(rng.uniform(np.log(5e-3), np.log(0.3))))
        demands.append(Demand(str(at), size, window_s, _LAYERS))
    budget = float(rng.uniform(0.4, 1.1)) * sum(each.zero_stall_rate for each in demands)
    slowdowns = tuple(_SLOWDOWNS[family](rng, float(rng.uniform(0, 0.1))) for _ in demands)
    return World(f"{family} {seed}", tuple(demands), budget, _MARGIN_SHARE * budget, slowdowns)


def _knee(rng: np.random.Generator, floor: float) -> Slowdown:
    """Eq. 4 with its knee elsewhere and a floor."""
    knee, slope = rng.uniform(0.3, 1.2), rng.uniform(0.7, 1.0)
    return lambda u: floor + slope * np.maximum(0.0, u - knee)


def _pieces(rng: np.random.Generator, floor: float) -> Slowdown:
    """Four lines of random slopes, then a slope of 1."""
    u_at = np.sort(np.exp(rng.uniform(np.log(0.3), np.log(4.0), 5)))
    y_at = floor + np.concatenate(([0.0], np.cumsum(rng.uniform(0.0, 1.0, 4) * np.diff(u_at))))
    return lambda u: np.asarray(np.interp(u, u_at, y_at) + np.maximum(0.0, u - u_at[-1]))


def _smooth(rng: np.random.Generator, floor: float) -> Slowdown:
    """A rounded knee."""
    knee, width = rng.uniform(0.4, 1.3), rng.uniform(0.02, 0.3)
    return lambda u: np.asarray(floor + width * np.logaddexp(0.0, (u - knee) / width))


def _steps(rng: np.random.Generator, floor: float) -> Slowdown:
    """Three steps on a slope of 0.2, which is 1.2 from four times r* on."""
    u_at, heights = np.sort(np.exp(rng.uniform(np.log(0.4), np.log(3.0), 3))), rng.uniform(0.05, 0.5, 3)

    def slowdown(u: Array) -> Array:
        steps = heights * np.clip((u[..., None] - u_at) / (0.05 * u_at), 0.0, 1.0)
        return np.asarray(floor + 0.2 * np.maximum(0.0, u - 0.8) + steps.sum(-1) + np.maximum(0.0, u - 4.0))

    return slowdown


def _concave(rng: np.random.Generator, floor: float) -> Slowdown:
    """The first that is missing costs most."""
    knee, power = rng.uniform(0.3, 0.9), rng.uniform(0.4, 0.9)
    return lambda u: np.asarray(floor + np.maximum(0.0, u - knee) ** power)


_SLOWDOWNS: Final = dict(zip(FAMILIES, (_knee, _pieces, _smooth, _steps, _concave), strict=True))
