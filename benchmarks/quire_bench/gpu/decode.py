"""Latents to pixels on the device: by engine, dtype and size, against the plain decode in float32.

The VAE has the shape of Stable Diffusion's and random weights: it takes as long, and its pictures are noise. On the CPU
it is a small one: there the measurement is only tried.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.progress import track

from quire.model.errors import ConfigInvalid, QuireError
from quire.model.latents import DecodeRule, LatentInfo, Vae
from quire_bench.decoder.quality import psnr
from quire_bench.gpu.device import Device
from quire_decoder.adapters.built_engines import USES_MIN, BuiltEngines
from quire_decoder.adapters.engines import make_engine
from quire_decoder.adapters.vae import DiffusersVaes, VaeSettings
from quire_decoder.adapters.weights import find_weights
from quire_decoder.ports import Pixels
from quire_tools.report import Row, median

_STAGES: Final = (128, 256, 512, 512)
_SMALL: Final = (32, 32, 64, 64)
_SCALE: Final = 8
_POLL_S: Final = 0.5


def make_vae(folder: Path, stages: Sequence[int]) -> str:
    """Write one of random weights; the digest of its weights."""
    from diffusers import AutoencoderKL

    torch.manual_seed(11)
    kind: Any = AutoencoderKL
    kind(
        block_out_channels=tuple(stages),
        down_block_types=("DownEncoderBlock2D",) * len(stages),
        up_block_types=("UpDecoderBlock2D",) * len(stages),
        layers_per_block=2,
        latent_channels=4,
    ).save_pretrained(folder)
    return hashlib.sha256(next(folder.glob("*.safetensors")).read_bytes()).hexdigest()


def measure(
    folder: Path, device: Device, sizes: Sequence[int], engines: Sequence[str], dtypes: Sequence[str], rounds: int
) -> tuple[list[Row], list[str]]:
    """Rows, and why an engine was left out."""
    weights = make_vae(folder, _STAGES if device.is_cuda else _SMALL)
    rows, notes = list[Row](), list[str]()
    cases = [(size, dtype, engine) for size in sizes for dtype in dtypes for engine in engines]
    references: dict[int, Pixels] = {}
    plain_s: dict[tuple[int, str], float] = {}
    for size, dtype, engine in track(cases, "decode", transient=True):
        latent, info = _latent(size, weights, dtype)
        try:
            if size not in references:
                exact = _vaes(folder, device, "eager")
                references[size] = exact.decode([latent], _latent(size, weights, "float32")[1]).pixels[0]
            vaes = _vaes(folder, device, engine)
            _wait_for_engine(vaes, latent, info)
            pixels = [vaes.decode([latent], info).pixels[0] for _ in range(2)][-1]
            took = [device.seconds(lambda: vaes.decode([latent], info)) for _ in range(rounds)]  # noqa: B023
        except (QuireError, RuntimeError) as error:
            notes.append(f"{engine}, {dtype}, {size}: {str(error).splitlines()[0]}")
            continue
        plain = plain_s.setdefault((size, dtype), median(took))
        figures = {"ms": median(took) * 1e3, "PSNR to float32, dB": min(99.0, psnr(pixels, references[size]))}
        params = {"part": f"decode {size}", "way": f"{engine}, {dtype}"}
        rows.append(Row(params, figures, plain * 1e3, plain / median(took)))
    return rows, notes


def _vaes(folder: Path, device: Device, engine: str) -> DiffusersVaes:
    name = "cuda:0" if device.is_cuda else "cpu"
    settings = VaeSettings(device=name, bytes_max=1 << 34, decode_bytes=1 << 36)
    return DiffusersVaes(find_weights([folder]), make_engine(engine, name, folder=folder.parent / "engines"), settings)


def _wait_for_engine(vaes: DiffusersVaes, latent: Any, info: LatentInfo) -> None:
    """Decode until the engine for the shape is built, if it is one that is built. Raises `ConfigInvalid`."""
    engine = vaes.engine
    if not isinstance(engine, BuiltEngines):
        return
    for _ in range(USES_MIN):
        vaes.decode([latent], info)
    while engine.files.is_building:
        time.sleep(_POLL_S)
    if not engine.files.ready:
        raise ConfigInvalid("the engine could not be built: the log says why")


def _latent(size: int, weights: str, dtype: str) -> tuple[Any, LatentInfo]:
    shape = (4, size // _SCALE, size // _SCALE)
    values = np.random.default_rng(size).standard_normal(shape).astype(np.float32)
    info = LatentInfo(shape, "float32", Vae("bench gpu", "", weights), size, size, decode=DecodeRule(dtype))
    return values, info
