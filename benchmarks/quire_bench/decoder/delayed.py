"""A decoder whose decodes take longer, to measure with the latency of a device that is not on this machine.

BENCH_DECODE_DELAY_MS=120 python -m quire_bench.decoder.delayed
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.model.latents import LatentInfo
from quire.model.nodes import KnownVae
from quire_decoder.config import PREFIX, DecoderConfig
from quire_decoder.ports import Decoded, Pixels, VaeRunner
from quire_decoder.server import serve
from quire_server.service import run_service


class DelayedVae:
    """Pixels of another `VaeRunner`, each batch later by a delay."""

    def __init__(self, vae: VaeRunner, delay_s: float) -> None:
        self._vae = vae
        self._delay_s = delay_s

    @property
    def build(self) -> str:
        return self._vae.build

    @property
    def lanes(self) -> int:
        return 1

    @property
    def known(self) -> tuple[KnownVae, ...]:
        return self._vae.known

    def close(self) -> None:
        self._vae.close()

    def encode(self, pixels: Pixels, weights_sha256: str) -> npt.NDArray[np.float32]:
        return self._vae.encode(pixels, weights_sha256)

    def decode(self, latents: Sequence[npt.NDArray[np.float32]], info: LatentInfo) -> Decoded:
        time.sleep(self._delay_s)
        return self._vae.decode(latents, info)


async def _serve(config: DecoderConfig) -> None:
    delay_s = float(os.environ["BENCH_DECODE_DELAY_MS"]) / 1e3
    await serve(config, lambda vae: DelayedVae(vae, delay_s))


if __name__ == "__main__":
    run_service("decoder", DecoderConfig, PREFIX, _serve)
