"""Ports of the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quire.model.descriptor import RdmaTarget
from quire.model.images import ImageEntry, LeasedRecord, Rendering
from quire.model.latents import LatentInfo
from quire.model.nodes import KnownVae
from quire_server.clock import Clock

__all__ = [
    "CacheOwner",
    "Clock",
    "EncoderProcess",
    "PeerMemoryPort",
    "PixelEncoder",
    "Pixels",
    "ProvenanceSigner",
    "RecordSource",
    "VaeRunner",
]

Pixels = npt.NDArray[np.uint8]
"""(height, width, 3), RGB."""


class RecordSource(Protocol):
    """The chunk store."""

    async def fetch(self, entry: ImageEntry, leased: LeasedRecord) -> bytes:
        """The record of an image. Raises `ChunkMissing`, `CorruptData`, `LeaseExpired`, `Unavailable`."""


class VaeRunner(Protocol):
    """A device with VAEs. Not for two threads at once."""

    @property
    def build(self) -> str:
        """Facts that decide the pixels of a latent: device, library versions."""

    @property
    def known(self) -> tuple[KnownVae, ...]:
        """VAEs that can be decoded with."""

    def decode(self, latents: Sequence[npt.NDArray[np.float32]], info: LatentInfo) -> list[Pixels]:
        """Decode a batch: latents of one shape, of which `info` describes the first. Blocks.

        Raises `VaeUnknown`, `DeviceFull`, `RecordInvalid`.
        """

    def encode(self, pixels: Pixels, weights_sha256: str) -> npt.NDArray[np.float32]:
        """The latent of a picture, (channels, height, width), as the VAE's decoder takes it. Blocks.

        Raises `VaeUnknown`, `DeviceFull`.
        """


class ProvenanceSigner(Protocol):
    """Signs what images say of their making."""

    @property
    def name(self) -> str:
        """Name of the certificate."""

    async def sign(self, image: bytes, rendering: Rendering, entry: ImageEntry) -> bytes:
        """Return the image with a signed manifest of the entry's provenance.

        Raises `InvalidRequest` for invalid provenance.
        """


class PixelEncoder(Protocol):
    """Formats. Blocks."""

    @property
    def build(self) -> str:
        """Facts that decide the bytes of given pixels: library versions."""

    def encode(self, pixels: Pixels, rendering: Rendering) -> bytes: ...
    def decode_lossless(self, image: bytes) -> Pixels:
        """Decode a PNG of `encode`."""


class EncoderProcess(Protocol):
    """A process that encodes one image at a time. `kill` may come from any thread."""

    @property
    def usable(self) -> bool:
        """Whether it takes another image."""

    def run(self, source: Pixels | bytes, rendering: Rendering) -> bytes:
        """Encode pixels, or a lossless file of them.

        Blocks. Raises what `PixelEncoder` raises, `ResourceExhausted`, `DeadlineExceeded`.
        """

    def kill(self) -> None:
        """End it, also in the middle of an image."""


class PeerMemoryPort(Protocol):
    """Bytes between registered memory of two processes."""

    async def push(self, data: bytes | memoryview, target: RdmaTarget) -> None:
        """Write into the peer's memory; there when this returns. Raises `TargetInvalid`, `PeerLost`."""

    async def pull(self, target: RdmaTarget, length: int) -> bytes:
        """Read from the peer's memory."""

    def lend(self, data: bytes) -> Any:
        """Registered memory with a copy of `data`: a context manager that yields its `RdmaTarget`."""

    def room(self, length: int) -> Any:
        """Registered memory for a peer to write: a context manager that yields (target, view)."""


class CacheOwner(Protocol):
    """A decoder whose cache a spilled request belongs to."""

    async def read_cached(self, address: str, entry: ImageEntry, target: RdmaTarget) -> tuple[str, int]:
        """Have it write its form into `target`: ("latent", "promote" or "image", length), or ("", 0)."""

    async def write_back(
        self,
        address: str,
        entry: ImageEntry,
        record: tuple[RdmaTarget, int] | None,
        image: tuple[RdmaTarget, int] | None,
    ) -> None:
        """Have it take a record or an image into its cache."""
