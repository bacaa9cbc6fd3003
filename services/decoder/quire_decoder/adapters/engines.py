"""Ways to run a VAE's decoder on a device. Each has roundings of its own, so its name is part of the build.

eager and channels_last run everywhere, graphs on CUDA. compile and tensorrt are built once (`adapters.built_engines`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from quire.model.errors import ConfigInvalid
from quire.telemetry import logger
from quire_decoder.adapters.weights import Weights
from quire_decoder.config import ENGINES
from quire_decoder.core.bounded import Bounded

Decode = Callable[[Any], Any]
"""A batch of latents, on the device, to samples: (N, C, h, w) to (N, 3, H, W)."""
Shape = tuple[int, ...]
_TOO_LARGE_MAX: Final = 1024
"""Shapes that are known to be too large to record; then they are found out anew: clients choose shapes."""


class DecodeEngine(Protocol):
    """Runs VAEs on one device. Not for two threads at once."""

    @property
    def name(self) -> str:
        """Build of the next batch, for batches of shapes that were decoded before."""

    @property
    def used(self) -> str:
        """Build of the batch that was begun last."""

    def begin(self) -> None:
        """Note that a batch begins."""

    def forget(self, weights_sha256: str, dtype: str) -> None:
        """Give up what belongs to a VAE that `prepare` was called with: its weights leave the device."""

    def close(self) -> None:
        """End background work."""

    def prepare(self, vae: Any, weights: Weights, dtype: str) -> Decode:
        """Return what decodes with a VAE. `dtype`: of its weights, as torch names it."""


class _OneBuild:
    """An engine whose build does not change."""

    name = used = ""

    def begin(self) -> None:
        """Do nothing."""

    def forget(self, weights_sha256: str, dtype: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Eager(_OneBuild):
    """Plain torch."""

    name = used = "eager"

    def prepare(self, vae: Any, weights: Weights, dtype: str) -> Decode:
        return eager(vae)


class ChannelsLast(_OneBuild):
    """Eager, with the memory order that convolutions of many devices prefer, where the VAE takes planes."""

    name = used = "channels_last"

    def prepare(self, vae: Any, weights: Weights, dtype: str) -> Decode:
        import torch

        if any(weight.dim() > 4 for weight in vae.parameters()):  # of videos: torch has that order for planes alone
            return eager(vae)
        vae.to(memory_format=torch.channels_last)
        return lambda latents: vae.decode(latents.contiguous(memory_format=torch.channels_last), return_dict=False)[0]


class Recording(Protocol):
    """Recorded work."""

    @property
    def size(self) -> int:
        """Bytes of the device's memory that it keeps."""

    def replay(self, latents: Any) -> Any:
        """Run it with other latents of the same shape."""


class RecordedShapes(_OneBuild):
    """A recording of all kernels, by shape, replayed in one call: no launch is waited for.

    Args:
        bytes_max: Memory for recordings. A shape that takes more alone runs eagerly.
        record: Records a decode with latents of a shape.
        released: Called after recordings were given up.
    """

    name = used = "graphs"

    def __init__(
        self, bytes_max: int, record: Callable[[Decode, Any], Recording], released: Callable[[], None] = lambda: None
    ) -> None:
        self._record = record
        self._recordings: Bounded[tuple[str, str, Shape], Recording] = Bounded(bytes_max, released)
        self._too_large: set[tuple[str, str, Shape]] = set()

    def forget(self, weights_sha256: str, dtype: str) -> None:
        """Give up the recordings of a VAE: they read its weights where these were."""
        self._recordings.discard(lambda key: key[:2] == (weights_sha256, dtype))

    def prepare(self, vae: Any, weights: Weights, dtype: str) -> Decode:
        self.forget(weights.sha256, dtype)
        # Contiguous: on an H200 convolutions with channels_last take half as long again (docs/evaluation.md).
        plain = eager(vae)

        def decode(latents: Any) -> Any:
            key = weights.sha256, dtype, tuple(latents.shape)
            if key in self._too_large:
                return plain(latents)
            recording = self._recordings.get(key)
            if recording is None:
                recording = self._record(plain, latents)
                if not self._recordings.put(key, recording, recording.size):
                    if len(self._too_large) >= _TOO_LARGE_MAX:
                        self._too_large.clear()
                    self._too_large.add(key)
                    logger().warning(
                        "a recording is not kept: QUIRE_DECODER_GRAPH_BYTES", shape=key[2], bytes=recording.size
                    )
            return recording.replay(latents)

        return decode


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device, or the host, has no memory left. On the CPU torch has no class for that."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and "allocate" in str(error))


def eager(vae: Any) -> Decode:
    """Return the plain decode of a VAE."""
    return lambda latents: vae.decode(latents, return_dict=False)[0]


def make_engine(name: str, device: str, graph_bytes: int = 8 << 30, folder: Path | None = None) -> DecodeEngine:
    """Return an engine by its name in the configuration; "auto": graphs on CUDA, else channels_last.

    Args:
        name: One of `ENGINES`.
        device: As torch names it.
        graph_bytes: Memory for recordings.
        folder: Keeps engines that are built; None for the user's cache.

    Raises:
        ConfigInvalid: It cannot run here.
    """
    is_cuda = device.startswith("cuda")
    if name == "auto":
        name = "graphs" if is_cuda else "channels_last"
    if name == "eager":
        return Eager()
    if name == "channels_last":
        return ChannelsLast()
    if name == "graphs" and is_cuda:
        from quire_decoder.adapters.cuda_graphs import record, release_memory

        return RecordedShapes(graph_bytes, record, release_memory)
    if name in ("compile", "tensorrt"):
        from quire_decoder.adapters.built_engines import BuiltEngines

        return BuiltEngines.of(name, device, folder)
    if name == "graphs":
        raise ConfigInvalid(f"QUIRE_DECODER_ENGINE=graphs needs CUDA, the device is {device}")
    raise ConfigInvalid(f"QUIRE_DECODER_ENGINE={name!r}; there are {', '.join(ENGINES)}")
