"""VAEs on one device, by diffusers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.model.errors import ConfigInvalid, VaeUnknown
from quire.model.latents import LatentInfo, Normalisation, RecordInvalid, Vae
from quire.model.nodes import KnownVae
from quire.telemetry import logger
from quire_decoder.adapters.engines import Decode, DecodeEngine, make_engine
from quire_decoder.adapters.weights import Weights, find_weights
from quire_decoder.core.vae_kinds import VaeKind
from quire_decoder.errors import DeviceFull
from quire_decoder.ports import Pixels

_TILE = 64  # latent pixels
DEMO_FOLDER = Path(__file__).parents[1] / "assets" / "demo_vae"


class DiffusersVaes:
    """The `VaeRunner` port, with the VAEs of folders (`find_weights`).

    VAEs are loaded when they are first needed; beyond `bytes_max` of weights the least recently used are dropped. An
    image whose decoding would take more than `decode_bytes` is decoded in tiles. Raises `ConfigInvalid` for a folder
    that is not there.
    """

    def __init__(
        self, folders: Sequence[Path], device: str, bytes_max: int, engine: str = "auto", decode_bytes: int = 4 << 30
    ) -> None:
        if device == "cuda" and not _has_cuda():
            raise ConfigInvalid("QUIRE_DECODER_DEVICE='cuda': torch finds no CUDA device; `auto` takes what there is")
        self._wanted = device
        self._engine: DecodeEngine = make_engine(engine, self._device_type)
        self._bytes_max = bytes_max
        self._decode_bytes = decode_bytes
        self._known = find_weights(folders)
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()

    @cached_property
    def build(self) -> str:
        libraries = f"torch {version('torch')}, diffusers {version('diffusers')}"
        return f"{libraries}, {self._device_name}, {self._engine.name}, tiles above {self._decode_bytes >> 20} MiB"

    @cached_property
    def _device(self) -> Any:
        """Torch is loaded with the first latent: a decoder that is not asked for anything takes no memory for it."""
        import torch

        name = self._wanted
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(name)

    @cached_property
    def _device_type(self) -> str:
        """Type of the device; torch is not loaded where there can be no CUDA."""
        if self._wanted == "cpu" or not Path("/dev/nvidiactl").exists():
            return "cpu"
        return str(self._device.type)

    @cached_property
    def _device_name(self) -> str:
        if self._device_type != "cuda":
            return self._device_type
        import torch

        return torch.cuda.get_device_name(self._device)

    @property
    def known(self) -> tuple[KnownVae, ...]:
        """VAEs that can be decoded with."""
        return tuple(weights.about for weights in self._known.values())

    def warm(self) -> None:
        """Load the known VAEs, as far as they fit, and decode a little with each: the first request need not wait.

        An unusable one is removed.
        """
        for weights in list(self._known.values()):
            kind = weights.kind
            shape, side = (kind.channels, 8, 8), 8 * kind.scale
            info = LatentInfo(shape, "float16", Vae("", "", weights.sha256), side, side, Normalisation())
            try:
                self.decode([np.zeros(shape, np.float32)], info)
            except Exception as error:
                logger().error("a VAE cannot be used", folder=str(weights.folder), error=str(error))
                del self._known[weights.sha256]

    def decode(self, latents: Sequence[npt.NDArray[np.float32]], info: LatentInfo) -> list[Pixels]:
        """Decode a batch. Raises `VaeUnknown`, `DeviceFull`, `RecordInvalid`."""
        import torch

        loaded, latent = self._load(info), latents[0]
        kind, scale = loaded.kind, loaded.kind.scale
        if latent.shape[0] != kind.channels:
            raise RecordInvalid(f"{latent.shape[0]} channels, the VAE has {kind.channels}", field="shape")
        if (latent.shape[1] * scale, latent.shape[2] * scale) != (info.height, info.width):
            raise RecordInvalid(f"{latent.shape} makes ×{scale}, not {info.height} × {info.width}", field="shape")
        try:
            with torch.inference_mode():
                tensor = torch.from_numpy(np.stack(latents)).to(self._device)
                tensor = tensor.to(loaded.dtype)
                samples = self._decoder(loaded, len(latents), info)(tensor[:, :, None] if kind.frames else tensor)
                samples = (samples[:, :, 0] if kind.frames else samples).float()
                pixels = (samples / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
                return list(np.asarray(pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy(), dtype=np.uint8))
        except RuntimeError as error:  # torch.OutOfMemoryError is one; on the CPU there is no class of its own
            if not isinstance(error, torch.OutOfMemoryError) and "allocate" not in str(error):
                raise
            if len(latents) == 1:  # a smaller batch may still fit beside what is loaded
                self._loaded.clear()
            torch.cuda.empty_cache()
            raise DeviceFull(f"no memory for {len(latents)} latents of {latent.shape}") from None

    def encode(self, pixels: Pixels, weights_sha256: str) -> npt.NDArray[np.float32]:
        """Encode an image. Raises `VaeUnknown`, `DeviceFull`."""
        import torch

        height, width = pixels.shape[:2]
        info = LatentInfo((1, 1, 1), "float16", Vae("", "", weights_sha256), height, width, Normalisation())
        loaded = self._load(info)
        if (needed := height * width * loaded.pixel_bytes) > self._decode_bytes:
            raise DeviceFull(f"{height} × {width} need some {needed >> 20} MiB, more than QUIRE_DECODER_DECODE_BYTES")
        with torch.inference_mode():
            tensor = torch.from_numpy(pixels).to(self._device).permute(2, 0, 1)[None].to(loaded.dtype) / 127.5 - 1
            encoded = loaded.encode(tensor[:, :, None] if loaded.kind.frames else tensor)
            latent = (encoded[:, :, 0] if loaded.kind.frames else encoded)[0]
            return np.asarray(latent.float().cpu().numpy(), dtype=np.float32)

    def _decoder(self, loaded: _Loaded, count: int, info: LatentInfo) -> Decode:
        """The whole image at once, or in tiles that overlap and are blended. Raises `DeviceFull` for too many."""
        needed = count * info.height * info.width * loaded.pixel_bytes
        if needed <= self._decode_bytes:
            return loaded.decode
        if count > 1:
            raise DeviceFull(
                f"{count} of {info.height} × {info.width} need some {needed >> 20} MiB, more than "
                f"QUIRE_DECODER_DECODE_BYTES ({self._decode_bytes >> 20} MiB)"
            )
        return loaded.tiled

    def _load(self, info: LatentInfo) -> _Loaded:
        """Return the VAE in the dtype of the record."""
        digest, dtype = info.vae.weights_sha256.lower(), info.decode.dtype
        name = f"{digest} {dtype}"
        if name in self._loaded:
            self._loaded.move_to_end(name)
            return self._loaded[name]
        weights = self._known.get(digest)
        if weights is None:
            raise VaeUnknown(
                f"no VAE with weights {digest[:16] or '(none named)'}…, of {info.vae.repository}", field="vae"
            )
        vae = _read(weights, dtype).to(self._device).eval()
        size = sum(parameter.numel() * parameter.element_size() for parameter in vae.parameters())
        while self._loaded and size + sum(loaded.size for loaded in self._loaded.values()) > self._bytes_max:
            self._loaded.popitem(last=False)
        pixel_bytes = int(weights.kind.pixel_values * vae.dtype.itemsize)
        tiled, encode = _tiled(vae, weights.kind.scale), _encoding(vae)
        loaded = _Loaded(
            self._engine.prepare(vae),
            tiled,
            encode=encode,
            kind=weights.kind,
            dtype=vae.dtype,
            size=size,
            pixel_bytes=pixel_bytes,
        )
        self._loaded[name] = loaded
        engine = self._engine.name
        logger().info("vae loaded", folder=str(weights.folder), bytes=size, device=str(self._device), engine=engine)
        return loaded


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A VAE on the device. `size`: bytes of its weights; `pixel_bytes`: about what decoding takes for each pixel."""

    decode: Decode
    tiled: Decode
    encode: Decode
    kind: VaeKind
    dtype: Any
    size: int
    pixel_bytes: int


def _encoding(vae: Any) -> Decode:
    """A batch of samples to latents: the most likely ones, where the VAE says a distribution."""

    def encode(samples: Any) -> Any:
        encoded = vae.encode(samples, return_dict=False)[0]
        return encoded.mode() if hasattr(encoded, "mode") and not hasattr(encoded, "shape") else encoded

    return encode


def _tiled(vae: Any, scale: int) -> Decode:
    vae.tile_latent_min_size, vae.tile_sample_min_size = _TILE, _TILE * scale
    vae.spatial_scale_factor = scale  # AutoencoderTiny's own counts colours instead of blocks

    def decode(latents: Any) -> Any:
        vae.enable_tiling()
        try:
            return vae.decode(latents, return_dict=False)[0]
        finally:
            vae.disable_tiling()

    return decode


def _read(weights: Weights, dtype: str) -> Any:
    import diffusers
    import torch

    kind = getattr(diffusers, weights.kind.class_name)
    options: dict[str, Any] = {"use_safetensors": True, "low_cpu_mem_usage": False, "variant": weights.variant or None}
    return kind.from_pretrained(weights.folder, torch_dtype=getattr(torch, dtype), **options)


def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())
