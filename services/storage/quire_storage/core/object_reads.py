"""Decisions about reads of the object tier: ranges of layers, requests at a time, requests sent twice. Pure.

A chunk object is layer-major, so a run of layers is one range, and a chunk takes log2(L) + 1 requests at most.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from quire.model.object_part import ObjectSpeed

_SAMPLES: Final = 256
_SAMPLES_MIN: Final = 20
_REQUESTS_A_HEDGE: Final = 20
_HEDGES_SAVED: Final = 8
_ANSWERS_A_JUDGEMENT: Final = 16
_SLOW: Final = 0.95
_SLOWER: Final = 2.0
_UP: Final = 1.5
_GAIN: Final = 1.1
_PAUSE_MAX: Final = 15
_ANSWERS_MIN: Final = 16
_RISE: Final = 1 + 2**-16
_SHORTEST_S: Final = 1e-6
_HALVINGS: Final = 24
_FIRST_WORTH: Final = 2
_NEVER_S: Final = 1e6
_WORTH: Final = 0.05
"""Part of the time to read everything at once that another run has to save."""
_KEPT: Final = 4
"""Windows of each size of requests: what small ones cost is known for long after only large ones were sent."""
_DISTINCT: Final = 0.01
_FASTER_MAX: Final = 10
"""Times the best rate that was seen: what bytes cost hardly shows where requests are small."""


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """Speed of the tier, with as many requests in flight as it bears.

    Attributes:
        latency_s: Seconds from a small request to its answer.
        bytes_per_s: Of all requests together, if they were large.
        request_s: Seconds that each request adds to the time of all, whatever its size.
        at_once: Requests in flight.
    """

    latency_s: float = 0.02
    bytes_per_s: float = 200e6
    request_s: float = 0.001
    at_once: int = 16

    def measured(self) -> ObjectSpeed:
        """Return what others decide by."""
        latency_us, request_us = round(self.latency_s * 1e6), round(self.request_s * 1e6)
        return ObjectSpeed(latency_us, request_us, max(1, round(self.bytes_per_s)))

    def seconds(self, requests: int, size: int) -> float:
        """Return the time until the last answer of that many requests for `size` bytes together."""
        return self.latency_s + requests * self.request_s + size / self.bytes_per_s


def layer_ranges(
    layers: int,
    layer_bytes: int,
    chunks: int,
    speed: TierSpeed,
    *,
    needed_s: Callable[[int], float] | None = None,
    layers_max: int = 1 << 30,
) -> list[range]:
    """Return the runs of layers that are read by one request for each chunk, in order.

    They make the layer that comes latest, counted from when it is needed, come as early as it can; with no more runs
    than that takes, and log2(L) + 1 at most. Where it is not known when layers are needed, layer 0 is read alone, and
    the rest as if layers were computed as fast as they are read; or all at once, unless that takes twice as long.

    Args:
        layers: Of a chunk, L.
        layer_bytes: Bytes of a layer of all chunks together.
        chunks: How many are read.
        speed: As measured.
        needed_s: Seconds from now until a layer is needed; None for unknown.
        layers_max: Layers of a run.
    """
    runs_max = max(layers.bit_length(), 1 - (1 - layers) // layers_max)
    first_s, whole_s = speed.seconds(chunks, layer_bytes), speed.seconds(chunks, layers * layer_bytes)
    if needed_s is None:
        if whole_s <= _FIRST_WORTH * first_s and layers <= layers_max:
            return [range(layers)]
        needs_s = [layer * whole_s / layers for layer in range(layers)]
    else:  # what should have been there already is needed now
        needs_s = [min(max(0.0, needed_s(layer)), _NEVER_S) for layer in range(layers)]
    bounded = _Runs(layer_bytes, chunks, speed, needs_s, layers_max, alone=needed_s is None)
    best: list[range] = []
    best_s = math.inf
    for count in range(1, runs_max + 1):
        late_s, runs = bounded.least_late(count)
        if runs and late_s < best_s - _WORTH * whole_s:
            best, best_s = runs, late_s
    return best


@dataclass(frozen=True, slots=True)
class _Runs:
    """Plans of a given number of runs. See `layer_ranges`.

    `needs_s`: seconds until each layer is needed. `alone`: the first run is layer 0.
    """

    layer_bytes: int
    chunks: int
    speed: TierSpeed
    needs_s: Sequence[float]
    layers_max: int
    alone: bool

    def least_late(self, count: int) -> tuple[float, list[range]]:
        """Return the least lateness with `count` runs at most, seconds, and the runs; none if it takes more."""
        low_s, high_s = 0.0, 1.01 * self.speed.seconds(count * self.chunks, len(self.needs_s) * self.layer_bytes)
        best = self._within(high_s, count)
        for _ in range(_HALVINGS if best else 0):
            middle_s = (low_s + high_s) / 2
            runs = self._within(middle_s, count)
            if runs:
                best, high_s = runs, middle_s
            else:
                low_s = middle_s
        return high_s, best

    def _within(self, late_s: float, count: int) -> list[range]:
        """Return runs of which none is later than that, each as long as it can be; none if it takes more of them."""
        runs: list[range] = []
        while (start := runs[-1].stop if runs else 0) < (layers := len(self.needs_s)):
            if len(runs) == count:
                return []
            requests_s = self.speed.seconds((len(runs) + 1) * self.chunks, 0)
            room_s = self.needs_s[start] + late_s - requests_s
            size = min(int(room_s * self.speed.bytes_per_s / self.layer_bytes) - start, self.layers_max)
            if self.alone and not runs:
                size = min(size, 1)
            if size < 1:
                return []
            runs.append(range(start, min(layers, start + size)))
        return runs


class RequestWindow:
    """Limit of the requests in flight, found by trials: higher while more is answered, lower if no less is.

    A limit is judged by the work that is answered per second. The work of an answer is the shortest time
    that its size can take, by the shortest latency that was seen and the best rate that one request has had; so answers
    of all sizes count alike. A refusal for too many requests halves the number.
    """

    def __init__(self, first: int = 32, lowest: int = 2, highest: int = 256) -> None:
        self._limit = float(first)
        self._lowest, self._highest = lowest, highest
        self._latency_s = self._s_per_byte = 0.0
        self._work_s = 0.0
        self._answers = self._bytes = 0
        self._since_s: float | None = None
        self._waited = False
        self._windows: dict[int, deque[tuple[int, int, float]]] = {}
        self._step, self._kept_rate = 1.0, 0.0
        self._pause = self._pauses = 0
        self._upwards = False
        self._refused_s = -math.inf

    @property
    def limit(self) -> int:
        """Requests that may be in flight now."""
        return int(self._limit)

    @property
    def speed(self) -> TierSpeed:
        """The tier, as measured so far."""
        if not self._windows:
            return replace(TierSpeed(), at_once=self.limit)
        windows = [window for windows in self._windows.values() for window in windows]
        request_s, byte_s = _costs(windows, self._latency_s / self.limit)
        fastest = max(size / elapsed_s for _, size, elapsed_s in windows)
        bytes_per_s = max(fastest, min(1 / byte_s if byte_s else 0.0, _FASTER_MAX * fastest))
        return TierSpeed(self._latency_s, bytes_per_s, request_s, self.limit)

    def ended(self, size: int, took_s: float, now_s: float) -> None:
        """Note an answer of `size` bytes. The number is judged anew after twice as many answers."""
        took_s = max(took_s, _SHORTEST_S)
        self._latency_s = min(self._latency_s * _RISE or took_s, took_s)
        if beyond_s := took_s - self._latency_s:
            rate = beyond_s / max(1, size)
            self._s_per_byte = min(self._s_per_byte * _RISE or rate, rate)
        self._work_s += self._latency_s + size * self._s_per_byte
        self._answers += 1
        self._bytes += size
        if self._since_s is None:
            self._since_s, self._waited = now_s - took_s, True
        if self._answers >= max(_ANSWERS_MIN, 2 * self.limit) and now_s > self._since_s:
            self._judge(now_s - self._since_s)
            self._work_s, self._answers, self._bytes, self._since_s, self._waited = 0.0, 0, 0, now_s, False

    def idle(self, now_s: float) -> None:
        """No request is in flight: the time until the next one says nothing about the tier."""
        if self._since_s is not None and self._answers >= _ANSWERS_MIN and self._waited:
            self._note(now_s - self._since_s - self._latency_s)
        self._forget()

    def _forget(self) -> None:
        self._since_s, self._work_s, self._answers, self._bytes = None, 0.0, 0, 0

    def throttled(self, began_s: float, now_s: float) -> None:
        """The tier refused a request because there were too many. Those that began before count as one refusal."""
        if began_s < self._refused_s:
            return
        self._refused_s = now_s
        self._move(0.5)
        self._step, self._kept_rate, self._pause = 1.0, 0.0, _PAUSE_MAX
        self._forget()

    def _judge(self, elapsed_s: float) -> None:
        rate = self._work_s / elapsed_s
        self._note(elapsed_s - self._latency_s if self._waited else elapsed_s)
        worth_it = rate > _GAIN * self._kept_rate if self._step > 1 else rate > self._kept_rate / _GAIN
        if self._step != 1 and not worth_it:  # back to where it was
            self._move(1 / self._step)
            self._pauses = min(_PAUSE_MAX, 2 * self._pauses + 1)
            self._step, self._pause = 1.0, self._pauses
            return
        self._kept_rate = rate
        if self._pause:
            self._pause -= 1
            self._step = 1.0
        elif self._step == 1:  # after a pause: the other way round than before
            self._upwards = not self._upwards
            self._try(_UP if self._upwards else 1 / _UP)
        else:
            self._try(self._step)

    def _note(self, elapsed_s: float) -> None:
        """Note the time of the answers since the last judgement, without the latency if that was waited for."""
        if elapsed_s <= 0:
            return
        size_class = (self._bytes // self._answers).bit_length()
        windows = self._windows.setdefault(size_class, deque(maxlen=_KEPT))
        windows.append((self._answers, self._bytes, elapsed_s))

    def _try(self, step: float) -> None:
        limit = self._limit
        self._move(step)
        self._step = self._limit / limit

    def _move(self, factor: float) -> None:
        self._limit = min(self._highest, max(self._lowest, self._limit * factor))


def _costs(windows: Iterable[tuple[int, int, float]], least_s: float) -> tuple[float, float]:
    """Return the seconds that a request and a byte cost, by least squares of relative errors; neither is negative.

    Args:
        windows: Answers, their bytes, and the time in which they came.
        least_s: Cost of a request, where all requests had the same size, so that it does not show.
    """
    rows = [(count / elapsed_s, size / elapsed_s) for count, size, elapsed_s in windows]
    nn, nb, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    n1, b1 = sum(row[0] for row in rows), sum(row[1] for row in rows)
    determinant = nn * bb - nb * nb
    if determinant > _DISTINCT * nn * bb:
        request_s, byte_s = (n1 * bb - b1 * nb) / determinant, (b1 * nn - n1 * nb) / determinant
        if request_s >= 0 and byte_s >= 0:
            return request_s, byte_s
        return (0.0, b1 / bb) if request_s < 0 else (n1 / nn, 0.0)
    return least_s, max(0.0, b1 / bb - least_s * nb / bb)


class Hedging:
    """Decides when a request is sent a second time: later than 95% of its size were answered, for one in twenty.

    Not before twice the usual time either: one in twenty is slower than 95%, and would leave none for one that hangs.
    """

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._answers = 0
        self._after_s: dict[int, float] = {}
        self._saved = _REQUESTS_A_HEDGE

    def after_s(self, size: int) -> float | None:
        """Return the time after which a request of `size` bytes counts as slow; None while that is not known."""
        return self._after_s.get(size.bit_length())

    def began(self) -> None:
        """Note a request: twenty of them pay for a second one."""
        self._saved = min(_HEDGES_SAVED * _REQUESTS_A_HEDGE, self._saved + 1)

    def take(self) -> bool:
        """Return whether a slow request may be sent once more, and count that."""
        if self._saved < _REQUESTS_A_HEDGE:
            return False
        self._saved -= _REQUESTS_A_HEDGE
        return True

    def ended(self, size: int, took_s: float) -> None:
        """Note the time until an answer of `size` bytes."""
        size_class = size.bit_length()
        times = self._times.setdefault(size_class, deque(maxlen=_SAMPLES))
        times.append(took_s)
        self._answers += 1
        if len(times) >= _SAMPLES_MIN and self._answers % _ANSWERS_A_JUDGEMENT == 0:
            ordered = sorted(times)
            slow_s, usual_s = ordered[int(_SLOW * len(times))], ordered[len(times) // 2]
            self._after_s[size_class] = max(slow_s, _SLOWER * usual_s)
