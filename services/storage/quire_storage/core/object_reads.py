"""Decisions about reads of the object tier: ranges of layers, requests at a time, requests sent twice. Pure.

A chunk object is layer-major, so a run of layers is one range. The first request for a chunk brings its first layer
alone; the ranges behind it grow, so that a chunk takes about log2(L) requests.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_SAMPLES: Final = 256
_SAMPLES_MIN: Final = 20
_REQUESTS_A_HEDGE: Final = 20
_HEDGES_SAVED: Final = 8
_ANSWERS_A_JUDGEMENT: Final = 16
_SLOW: Final = 0.95
_UP: Final = 1.5
_GAIN: Final = 1.1
_PAUSE_MAX: Final = 15
_ANSWERS_MIN: Final = 16
_RISE: Final = 1 + 2**-16
_SHORTEST_S: Final = 1e-6
_RATE_KEPT: Final = 0.9


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """Speed of the tier: seconds from a small request to its answer, bytes/s of all requests, requests at a time."""

    latency_s: float = 0.02
    bytes_per_s: float = 200e6
    at_once: int = 16


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

    Layer 0 alone, then 1, 2, 4 … layers; more at a time where they arrive before they are needed all the same. All
    layers at once, if they take less than another answer would.

    Args:
        layers: Of a chunk, L.
        layer_bytes: Bytes of a layer of all chunks together.
        chunks: How many are read.
        speed: As measured.
        needed_s: Seconds from now until a layer is needed; None for unknown.
        layers_max: Layers of a run.
    """
    if layers <= layers_max and (layers - 1) * layer_bytes <= speed.latency_s * speed.bytes_per_s:
        return [range(layers)]

    def takes_s(count: int) -> float:
        rounds = -(-chunks // speed.at_once)
        return max(rounds * speed.latency_s, speed.latency_s + count * layer_bytes / speed.bytes_per_s)

    ranges, spent_s, size = [range(1)], takes_s(1), 1
    while (first := ranges[-1].stop) < layers:
        while needed_s is not None and first + size < layers and spent_s + takes_s(2 * size) <= needed_s(first):
            size *= 2
        ranges.append(range(first, min(layers, first + size, first + layers_max)))
        spent_s += takes_s(len(ranges[-1]))
        size *= 2
    return ranges


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
        self._bytes_per_s = 0.0
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
        guess = TierSpeed()
        return TierSpeed(self._latency_s or guess.latency_s, self._bytes_per_s or guess.bytes_per_s, self.limit)

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
            self._since_s = now_s - took_s
        if self._answers >= max(_ANSWERS_MIN, 2 * self.limit) and now_s > self._since_s:
            self._judge(now_s - self._since_s)
            self._work_s, self._answers, self._bytes, self._since_s = 0.0, 0, 0, now_s

    def idle(self) -> None:
        """No request is in flight: the time until the next one says nothing about the tier."""
        self._since_s, self._work_s, self._answers, self._bytes = None, 0.0, 0, 0

    def throttled(self, began_s: float, now_s: float) -> None:
        """The tier refused a request because there were too many. Those that began before count as one refusal."""
        if began_s < self._refused_s:
            return
        self._refused_s = now_s
        self._move(0.5)
        self._step, self._kept_rate, self._pause = 1.0, 0.0, _PAUSE_MAX
        self.idle()

    def _judge(self, elapsed_s: float) -> None:
        rate = self._work_s / elapsed_s
        self._bytes_per_s = max(_RATE_KEPT * self._bytes_per_s, self._bytes / elapsed_s)
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

    def _try(self, step: float) -> None:
        limit = self._limit
        self._move(step)
        self._step = self._limit / limit

    def _move(self, factor: float) -> None:
        self._limit = min(self._highest, max(self._lowest, self._limit * factor))


class Hedging:
    """Decides when a request is sent a second time: later than 95% of its size were answered, for one in twenty."""

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
            self._after_s[size_class] = sorted(times)[int(_SLOW * len(times))]
