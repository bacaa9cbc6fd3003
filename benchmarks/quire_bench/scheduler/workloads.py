"""Sets of concurrent requests to share a link: a user's, or those of ObjectCache's evaluation with its measurements."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from quire.model.errors import InvalidRequest
from quire_scheduler.core.adaptive import cheapest_on_grid
from quire_scheduler.core.curves import Array, monotone
from quire_scheduler.core.policy import Demand

GBPS: Final = 1e9 / 8
_PAPER: Final = Path(__file__).parent / "objectcache.json"
_LAYERS: Final = 32
_OPTIMUM_UNITS: Final = 1000


@dataclass(frozen=True, slots=True)
class Request:
    """One delivery: s_i in bytes, c_i in milliseconds."""

    name: str
    bytes_per_layer: int
    window_ms: float
    layers: int = _LAYERS

    def demand(self) -> Demand:
        """As the scheduler gets it."""
        return Demand(self.name, self.bytes_per_layer, self.window_ms / 1e3, self.layers)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that come at the same time over a link of `cap_gbps`."""

    name: str
    cap_gbps: float
    requests: tuple[Request, ...]

    @property
    def demands(self) -> list[Demand]:
        return [request.demand() for request in self.requests]

    @property
    def budget(self) -> float:
        """Bytes per second."""
        return self.cap_gbps * GBPS

    def stalls_s(self, rates: Array) -> Array:
        """What each request is slowed by: Eq. 3 at its rate less Eq. 3 at any rate. Seconds."""
        sizes, windows, layers = np.array(
            [(each.bytes_per_layer, each.window_ms / 1e3, each.layers) for each in self.requests]
        ).T
        transfers = sizes / rates
        return np.asarray(transfers + (layers - 1) * np.maximum(0.0, transfers - windows))

    def added_ttft_s(self, rates: Array) -> float:
        """The sum of `stalls_s`."""
        return float(self.stalls_s(rates).sum())


def read_workload(file: Path) -> Workload:
    """JSON: cap_gbps, requests [{name, bytes_per_layer, window_ms, layers = 32}]. Raises `InvalidRequest`."""
    try:
        record = json.loads(file.read_text())
        requests = tuple(Request(**request) for request in record["requests"])
        workload = Workload(file.stem, record["cap_gbps"], requests)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidRequest(f"{file} is no workload: {error!r}", field="workload") from None
    _positive("cap_gbps", workload.cap_gbps)
    if not workload.requests:
        raise InvalidRequest("there are none", field="requests")
    for index, request in enumerate(workload.requests):
        for field in ("bytes_per_layer", "window_ms", "layers"):
            _positive(f"requests[{index}].{field}", getattr(request, field))
    return workload


def _positive(field: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise InvalidRequest(f"{value!r} is not positive and finite", field=field)


class PaperMeasurements:
    """ObjectCache's Tables A8 to A12.

    TTFT over rate, by shape: all that was measured of the shape, whichever workload and policy, as a function of
    1/rate that is monotone (pool adjacent violators) and linear in between. Slower than the slowest measured rate, a
    layer more of 1/rate costs 32 layers of transfer time (Eq. 3); faster than the fastest, nothing changes.
    """

    def __init__(self) -> None:
        self._data: dict[str, Any] = json.loads(_PAPER.read_text())

    @property
    def source(self) -> str:
        return str(self._data["source"])

    @property
    def margin_gbps(self) -> float:
        return float(self._data["margin_gbps"])

    @property
    def workloads(self) -> list[Workload]:
        return [
            Workload(name, each["cap_gbps"], tuple(self.request(shape) for shape in each["requests"]))
            for name, each in self._data["workloads"].items()
        ]

    def request(self, shape: str) -> Request:
        """A shape of Table A8, e.g. "64K 87.5%"."""
        return Request(shape, layers=self._data["layers"], **self._data["shapes"][shape])

    def published_gbps(self, workload: str, policy: str) -> list[float]:
        """Rates of Table A9, in the workload's order."""
        by_request = {each["request"]: each["gbps"] for each in self._measured(workload, policy)}
        return [by_request[shape] for shape in self._data["workloads"][workload]["requests"]]

    def published_added_ms(self, workload: str, policy: str) -> float:
        """ΔTTFT of Table A12; not a number for a policy that the paper does not have."""
        for each in self._data["published"]:
            if (each["workload"], each["policy"]) == (workload, policy):
                return float(each["added_ttft_ms"])
        return math.nan

    def added_ms(self, workload: Workload, rates: Array) -> float:
        """ΔTTFT over the workload's published no-limit total, at rates in bytes per second, on the curves."""
        total = sum(
            float(self.ttft_ms(request.name, np.array([rate]))[0])
            for request, rate in zip(workload.requests, rates, strict=True)
        )
        return total - float(self._data["workloads"][workload.name]["no_limit_ttft_ms"])

    def ttft_ms(self, shape: str, rates: Array) -> Array:
        """TTFT of a shape at rates in bytes per second."""
        inverse, ttft = self._curves[shape]
        asked = 1.0 / np.asarray(rates, dtype=np.float64)
        request = self.request(shape)
        beyond = np.maximum(0.0, asked - inverse[-1]) * request.layers * request.bytes_per_layer * 1e3
        return np.asarray(np.interp(asked, inverse, ttft) + beyond)

    def measured(self, shape: str) -> tuple[Array, Array]:
        """All that was measured of a shape: seconds per byte, and TTFT in ms."""
        points = [each for each in self._data["measured"] if each["request"] == shape]
        inverse = np.array([1.0 / (each["gbps"] * GBPS) for each in points])
        return inverse, np.array([each["ttft_ms"] for each in points])

    def stall_ms(self, shape: str, rate: float) -> float:
        """TTFT beyond the least that was measured of the shape."""
        return float(self.ttft_ms(shape, np.array([rate]))[0] - self._curves[shape][1][0])

    def optimum(self, workload: Workload) -> Array:
        """Rates with the least total TTFT on the curves, by exact search in units of a thousandth of the cap."""
        grid = workload.budget * np.arange(1, _OPTIMUM_UNITS + 1) / _OPTIMUM_UNITS
        costs = [self.ttft_ms(request.name, grid) for request in workload.requests]
        return cheapest_on_grid(costs, workload.budget)

    @cached_property
    def _curves(self) -> dict[str, tuple[Array, Array]]:
        curves = {}
        for shape in {each["request"] for each in self._data["measured"]}:
            inverse, ttft = self.measured(shape)
            curves[shape] = monotone(inverse, ttft, np.ones(len(ttft)))
        return curves

    def _measured(self, workload: str, policy: str) -> list[dict[str, Any]]:
        return [each for each in self._data["measured"] if (each["workload"], each["policy"]) == (workload, policy)]
