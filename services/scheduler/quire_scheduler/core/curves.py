"""Slowdown of deliveries by rate: one curve per shape, learned from finished deliveries.

In the units of a shape, u = r*/r (how much longer a layer takes than its compute window) and y = stall / (L·c), Eq. 4
says y = max(0, u - 1) for every shape. Measured curves have their knee elsewhere, floors and steps. A `Curve` keeps
averages of y in narrow bins of u, made monotone (pool adjacent violators), and is linear in u, that is in 1/rate,
between them.

Between two knots a monotone curve may still be anywhere in a rectangle. A curve returns its lowest and highest possible
value there, so that an allocator can try promising rates. It takes the slope to be at most 1, as in Eq. 4, or twice
the average between the two knots.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from quire_scheduler.core.policy import Demand, Observation

Array = npt.NDArray[np.float64]
_BINS_PER_E: Final = 60
_BINS_MAX: Final = 128
_BUCKETS_PER_E: Final = 10
_FORGET: Final = 0.1
_KNEE_MIN: Final = 0.1
_HOPED_BEYOND: Final = 1.6
_SLOPE_BEYOND_MIN: Final = 0.2
_TOLD_MAX: Final = 256


class Bounds(NamedTuple):
    """Least, expected and greatest stall; arrays of one shape."""

    least: Array
    expected: Array
    most: Array


@dataclass(frozen=True, slots=True)
class Learned:
    """Form of a curve for the next leader. `bins`: (number, u, y, observations); `seen`: of all bins."""

    tenant: str
    shape: tuple[int, int]
    seen: int
    bins: tuple[tuple[int, float, float, int], ...]


class Curve:
    """Observed stall over inverse rate, in units of the shape."""

    def __init__(self) -> None:
        self._bins: OrderedDict[int, tuple[float, float, int]] = OrderedDict()
        self._knots: tuple[Array, Array] | None = None
        self._seen = 0

    def __len__(self) -> int:
        return len(self._bins)

    def __bool__(self) -> bool:
        return True

    def add(self, u: float, y: float) -> None:
        """Bins are moving averages, so that a curve follows its deployment."""
        self._seen += 1
        name = round(math.log(u) * _BINS_PER_E)
        mean_u, mean_y, count = self._bins.pop(name, (0.0, 0.0, 0))
        share = max(_FORGET, 1 / (count + 1))
        self._bins[name] = (mean_u + share * (u - mean_u), mean_y + share * (y - mean_y), count + 1)
        if len(self._bins) > _BINS_MAX:
            self._bins.popitem(last=False)
        self._knots = None

    def told(self, tenant: str, shape: tuple[int, int]) -> Learned:
        """Return its content."""
        return Learned(tenant, shape, self._seen, tuple((name, *means) for name, means in self._bins.items()))

    @classmethod
    def of(cls, learned: Learned) -> Curve:
        """Restore a curve."""
        curve = cls()
        curve._bins = OrderedDict((name, (u, y, count)) for name, u, y, count in learned.bins[-_BINS_MAX:])
        curve._seen = learned.seen
        return curve

    @property
    def seen(self) -> int:
        """How many deliveries were observed."""
        return self._seen

    def at(self, u: Array) -> Array:
        """Expected y; with nothing observed, Eq. 4."""
        return self.bounds(u).expected

    def bounds(self, u: Array) -> Bounds:
        """Return bounds of y. With nothing observed all three are Eq. 4."""
        if not self._bins:
            eq4 = np.maximum(0.0, u - 1.0)
            return Bounds(eq4, eq4, eq4)
        if self._knots is None:
            us, ys, counts = (np.array(column, dtype=np.float64) for column in zip(*self._bins.values(), strict=True))
            self._knots = monotone(us, ys, counts)
        us, ys = self._knots
        expected = np.interp(u, us, ys) + np.maximum(0.0, u - us[-1])
        least, greatest = self._between(u, us, ys)
        slower = u > us[-1]
        hoped = np.maximum(ys[-1], _SLOPE_BEYOND_MIN * (u - 1.0))  # a little slower may cost next to nothing
        least = np.where(slower, np.where(u < _HOPED_BEYOND * us[-1], hoped, expected), least)
        greatest = np.where(slower, expected, greatest)
        return Bounds(np.minimum(least, expected), expected, np.maximum(greatest, expected))

    @staticmethod
    def _between(u: Array, us: Array, ys: Array) -> tuple[Array, Array]:
        """Least and most of y up to the slowest knot. Faster than the fastest knot, y may fall to 0 at `_KNEE_MIN`."""
        right = np.minimum(np.searchsorted(us, u), len(us) - 1)
        low_index = np.maximum(0, right - 1)
        inside = (u >= us[0]) & (right > low_index)
        low = np.where(inside, ys[low_index], 0.0)
        width = np.where(inside, us[right] - us[low_index], 1.0)
        slope = np.where(inside, np.maximum(1.0, 2.0 * (ys[right] - low) / np.maximum(width, 1e-12)), 1.0)
        least = np.maximum(low, ys[right] - slope * (us[right] - np.maximum(u, _KNEE_MIN)))
        upper = np.where(inside, np.minimum(ys[right], low + slope * (u - us[low_index])), ys[right])
        return least, upper


class Curves:
    """Curves by tenant and shape; shapes within about 10% of each other share one.

    Bounded: the shapes that were not observed for longest are dropped, of a tenant's `shapes_max` shapes and of
    `tenants_max` tenants.
    """

    def __init__(self, shapes_max: int = 256, tenants_max: int = 256) -> None:
        self._shapes_max = shapes_max
        self._tenants_max = tenants_max
        self._curves: OrderedDict[str, OrderedDict[tuple[int, int], Curve]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._curves.values()))

    def observe(self, observation: Observation) -> None:
        curves = self._curves.setdefault(observation.tenant, OrderedDict())
        self._curves.move_to_end(observation.tenant)
        shape = _shape(observation.bytes_per_layer, observation.compute_window_s)
        curve = curves.setdefault(shape, Curve())
        curves.move_to_end(shape)
        zero_stall = observation.bytes_per_layer / observation.compute_window_s
        curve.add(
            zero_stall / observation.rate_bytes_per_s,
            observation.stall_s / (observation.layers * observation.compute_window_s),
        )
        if len(curves) > self._shapes_max:
            curves.popitem(last=False)
        if len(self._curves) > self._tenants_max:
            self._curves.popitem(last=False)

    def told(self) -> list[Learned]:
        """The curves that were observed last, 256 at most, the latest at the end."""
        learned = [
            curve.told(tenant, shape) for tenant, curves in self._curves.items() for shape, curve in curves.items()
        ]
        return learned[-_TOLD_MAX:]

    def take_over(self, learned: Iterable[Learned]) -> None:
        """Take over another one's curves, instead of its own of these shapes."""
        for item in learned:
            curves = self._curves.setdefault(item.tenant, OrderedDict())
            curves[item.shape] = Curve.of(item)

    def seen(self, demand: Demand) -> int:
        """How many deliveries of this shape were observed."""
        curve = self._find(demand)
        return 0 if curve is None else curve.seen

    def bounds_s(self, demand: Demand, rates: Array) -> Bounds:
        """Return bounds of the stall per layer, at each of `rates`; without a window, of the time of a layer.

        Per layer, as in Eq. 5, and not times the remaining layers: a delivery that is nearly done frees its rate for
        all.
        """
        if demand.compute_window_s is None:
            times = demand.bytes_per_layer / rates
            return Bounds(times, times, times)
        curve = self._find(demand) or _NOTHING_SEEN
        window_s = demand.compute_window_s
        return Bounds(*(window_s * y for y in curve.bounds(demand.zero_stall_rate / rates)))

    def _find(self, demand: Demand) -> Curve | None:
        if demand.compute_window_s is None:
            return None
        curves = self._curves.get(demand.tenant)
        return None if curves is None else curves.get(_shape(demand.bytes_per_layer, demand.compute_window_s))


def monotone(x: Array, y: Array, weights: Array) -> tuple[Array, Array]:
    """The non-decreasing function of sorted `x` nearest to `y` in weighted least squares (pool adjacent violators)."""
    order = np.argsort(x, kind="stable")
    x, y, weights = x[order], y[order], weights[order]
    blocks: list[tuple[float, float, int]] = []  # mean, weight, members
    for value, weight in zip(y.tolist(), weights.tolist(), strict=True):
        block = (value, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, heavy, members = blocks.pop()
            total = heavy + block[1]
            block = ((mean * heavy + block[0] * block[1]) / total, total, members + block[2])
        blocks.append(block)
    means = np.repeat([mean for mean, _, _ in blocks], [members for _, _, members in blocks])
    return x, means.astype(np.float64)


_NOTHING_SEEN: Final = Curve()


def _shape(bytes_per_layer: int, window_s: float) -> tuple[int, int]:
    return round(math.log(bytes_per_layer) * _BUCKETS_PER_E), round(math.log(window_s) * _BUCKETS_PER_E)
