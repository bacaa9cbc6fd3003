"""A VAE whose decodes take longer: to measure with the latency of a device that is not here."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.model.latents import LatentInfo
from quire.model.nodes import KnownVae
from quire_decoder.ports import Pixels, VaeRunner


class DelayedVae:
    """The `VaeRunner` port: another one's pixels, each batch so much later."""

    def __init__(self, vae: VaeRunner, delay_s: float) -> None:
        self._vae = vae
        self._delay_s = delay_s

    @property
    def build(self) -> str:
        return self._vae.build

    @property
    def known(self) -> tuple[KnownVae, ...]:
        return self._vae.known

    def encode(self, pixels: Pixels, weights_sha256: str) -> npt.NDArray[np.float32]:
        return self._vae.encode(pixels, weights_sha256)

    def decode(self, latents: Sequence[npt.NDArray[np.float32]], info: LatentInfo) -> list[Pixels]:
        time.sleep(self._delay_s)
        return self._vae.decode(latents, info)
