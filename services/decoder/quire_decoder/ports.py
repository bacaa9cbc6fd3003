"""Ports of the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    "CachedForm",
    "Clock",
    "Decoded",
    "EncoderProcess",
    "PeerMemoryPort",
    "Picture",
    "PixelEncoder",
    "Pixels",
    "ProvenanceSigner",
    "RecordSource",
    "VaeRunner",
]

Pixels = npt.NDArray[np.uint8]
"""(height, width, 3), RGB."""


@dataclass(frozen=True, slots=True)
class Picture:
    """The pixels of a file's first frame, and whether others follow."""

    pixels: Pixels
    is_first_of_several: bool


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded batch.

    Attributes:
        pixels: Of each latent.
        seconds: That the device took.
        build: Facts that decided the pixels. Engines are built while a decoder runs, so it may change.
    """

    pixels: list[Pixels]
    seconds: float
    build: str


class RecordSource(Protocol):
    """The chunk store."""

    async def fetch(self, entry: ImageEntry, leased: LeasedRecord) -> bytes:
        """The record of an image. Raises `ChunkMissing`, `CorruptData`, `LeaseExpired`, `Unavailable`."""


class VaeRunner(Protocol):
    """A device with VAEs."""

    @property
    def build(self) -> str:
        """Facts that decide the pixels of a latent from now on: device, library versions, engines."""

    @property
    def lanes(self) -> int:
        """Threads that may call `decode`: with two, one batch is copied while another is decoded."""

    @property
    def known(self) -> tuple[KnownVae, ...]:
        """VAEs that can be decoded with."""

    def decode(self, latents: Sequence[npt.NDArray[np.float32]], info: LatentInfo) -> Decoded:
        """Decode a batch: latents of one shape, of which `info` describes the first. Blocks.

        Raises `VaeUnknown`, `DeviceFull`, `RecordInvalid`.
        """

    def encode(self, pixels: Pixels, weights_sha256: str) -> npt.NDArray[np.float32]:
        """The latent of a picture, (channels, height, width), as the VAE's decoder takes it. Blocks.

        Raises `VaeUnknown`, `DeviceFull`.
        """

    def close(self) -> None:
        """End background work."""


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


@dataclass(frozen=True, slots=True)
class CachedForm:
    """A form of an image that was written into a decoder's memory.

    Attributes:
        kind: "latent", "promote" (a latent, of which the image is wanted back) or "image".
        length: Bytes.
        build: Of the decoder that has it.
    """

    kind: str
    length: int
    build: str


class CacheOwner(Protocol):
    """A decoder whose cache a spilled request belongs to."""

    async def read_cached(self, address: str, entry: ImageEntry, target: RdmaTarget) -> CachedForm | None:
        """Have it write its form into `target`; None where it has none."""

    async def write_back(
        self,
        address: str,
        entry: ImageEntry,
        record: tuple[RdmaTarget, int] | None,
        image: tuple[RdmaTarget, int] | None,
        build: str = "",
    ) -> None:
        """Have it take a record, or an image of a build, into its cache."""
