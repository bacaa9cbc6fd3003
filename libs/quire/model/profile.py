"""Compute profiles: how long a model on a device takes to prefill, by input length × prefix length.

One table for three consumers: the compute window c_i of the bandwidth scheduler (ObjectCache, Eq. 4), the slack in
which storage nodes write (Tutti, §4), and the advice of a look-up whether fetching is faster than computing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from quire.model.errors import InvalidRequest

Array = npt.NDArray[np.float64]
_SHIPPED: Final = Path(__file__).parent / "profiles"


@dataclass(frozen=True, slots=True)
class Sample:
    """Prefill of `input_tokens` new tokens behind `prefix_tokens` cached ones took `seconds`, all layers together."""

    input_tokens: int
    prefix_tokens: int
    seconds: float


@dataclass(frozen=True)
class ComputeProfile:
    """Measurements of one (model, device). `source`: by whom, with which tool. Raises `InvalidRequest`.

    In between, prefill time follows a + b·n + c·n·(p + n/2). These are the costs of a forward pass of n tokens that
    attend to p cached ones and to each other. They are fitted to the samples, and then corrected to pass through each
    of them (inverse distances, in logarithms of input and context).
    """

    model: str
    device: str
    num_layers: int
    source: str
    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise InvalidRequest(f"{self.num_layers} is not positive", field="num_layers")
        if len(self.samples) < 2:
            raise InvalidRequest(f"{len(self.samples)} samples, two are needed", field="samples")
        for sample in self.samples:
            if sample.input_tokens < 1 or sample.prefix_tokens < 0 or not 0 < sample.seconds < float("inf"):
                raise InvalidRequest(f"{sample} cannot have been measured", field="samples")

    def prefill_s(self, input_tokens: npt.ArrayLike, prefix_tokens: npt.ArrayLike) -> Array:
        """Seconds to prefill, for scalars or arrays; 0 where the input is 0."""
        inputs, prefixes = np.broadcast_arrays(
            np.asarray(input_tokens, dtype=np.float64), np.asarray(prefix_tokens, dtype=np.float64)
        )
        if np.any(inputs < 0) or np.any(prefixes < 0):
            raise InvalidRequest("token counts must not be negative", field="input_tokens")
        floor = np.maximum(inputs, 1.0)
        points = _log_points(floor, prefixes)
        trend = _features(floor, prefixes) @ self._coefficients
        distances = ((points[..., None, :] - self._points) ** 2).sum(-1)
        weights = 1.0 / (distances + 1e-9) ** 2
        correction = np.exp((weights * self._log_ratios).sum(-1) / weights.sum(-1))
        return np.where(inputs > 0, trend * correction, 0.0)

    def window_s(self, input_tokens: npt.ArrayLike, prefix_tokens: npt.ArrayLike) -> Array:
        """Compute window per layer c_i."""
        return self.prefill_s(input_tokens, prefix_tokens) / self.num_layers

    def save(self, file: Path) -> None:
        """Write it as JSON."""
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @cached_property
    def _columns(self) -> tuple[Array, Array, Array]:
        rows = np.array(
            [(sample.input_tokens, sample.prefix_tokens, sample.seconds) for sample in self.samples], dtype=float
        )
        return rows[:, 0], rows[:, 1], rows[:, 2]

    @cached_property
    def _coefficients(self) -> Array:
        """Non-negative least squares of relative errors: of three coefficients, the best feasible subset."""
        inputs, prefixes, seconds = self._columns
        scaled = _features(inputs, prefixes) / seconds[:, None]
        best, best_error = np.zeros(3), np.inf
        for count in (1, 2, 3):
            for chosen in map(list, itertools.combinations(range(3), count)):
                solution, *_ = np.linalg.lstsq(scaled[:, chosen], np.ones(len(seconds)), rcond=None)
                error = float(((scaled[:, chosen] @ solution - 1.0) ** 2).sum())
                if np.all(solution >= 0) and solution.any() and error < best_error - 1e-12:
                    best, best_error = np.zeros(3), error
                    best[chosen] = solution
        return best

    @cached_property
    def _points(self) -> Array:
        inputs, prefixes, _ = self._columns
        return _log_points(inputs, prefixes)

    @cached_property
    def _log_ratios(self) -> Array:
        inputs, prefixes, seconds = self._columns
        return np.asarray(np.log(seconds / (_features(inputs, prefixes) @ self._coefficients)))


def ttft_s(layer_transfer_s: npt.ArrayLike, window_s: npt.ArrayLike, num_layers: int) -> Array:
    """Time to first token with one-layer prefetch (ObjectCache, Eq. 3), every layer like the others.

    X_0 + Σ_{ℓ=0}^{L-2} max(X, C) + C.
    """
    transfer, window = np.asarray(layer_transfer_s, dtype=np.float64), np.asarray(window_s, dtype=np.float64)
    return np.asarray(transfer + (num_layers - 1) * np.maximum(transfer, window) + window)


def load_profile(file: Path) -> ComputeProfile:
    """Parse a profile. Raises `InvalidRequest`, with the reason."""
    try:
        record: dict[str, Any] = json.loads(file.read_text())
        samples = tuple(Sample(**sample) for sample in record.pop("samples"))
        return ComputeProfile(**record, samples=samples)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidRequest(f"{file} is no compute profile: {error}", field="profile") from None


class Profiles:
    """The profiles that come with Quire, and those of `folder`; of two for the same pair the folder's counts."""

    def __init__(self, folder: Path | None = None) -> None:
        files: Sequence[Path] = sorted(_SHIPPED.glob("*.json"))
        if folder is not None:
            files = [*files, *sorted(folder.glob("*.json"))]
        self._profiles = {
            (_short(profile.model), profile.device.lower()): profile for profile in map(load_profile, files)
        }

    def all(self) -> list[ComputeProfile]:
        """Return all profiles."""
        return list(self._profiles.values())

    def find(self, model: str, device: str) -> ComputeProfile | None:
        """Find a profile by the model's name without its organisation, and the device's; case does not count."""
        return self._profiles.get((_short(model), device.lower()))


def _short(model: str) -> str:
    return model.rpartition("/")[2].lower()


def _features(inputs: Array, prefixes: Array) -> Array:
    return np.stack([np.ones_like(inputs), inputs, inputs * (prefixes + inputs / 2)], axis=-1)


def _log_points(inputs: Array, prefixes: Array) -> Array:
    return np.stack([np.log(inputs), np.log(inputs + prefixes)], axis=-1)
