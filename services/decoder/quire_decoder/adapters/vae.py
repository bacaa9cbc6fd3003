"""VAEs on one device, by diffusers."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.model.errors import ConfigInvalid, PictureTooLarge, VaeUnknown
from quire.model.latents import LatentInfo, Normalisation, RecordInvalid, Vae
from quire.model.nodes import KnownVae
from quire.telemetry import logger
from quire.transport.devices import CopyStream, Event, copy_stream
from quire_decoder.adapters.engines import Decode, DecodeEngine, is_out_of_memory
from quire_decoder.adapters.loading import LoadedVae, load_vae, to_pixels
from quire_decoder.adapters.weights import Weights
from quire_decoder.core.precision import RECORD
from quire_decoder.errors import DeviceFull
from quire_decoder.ports import Decoded, Pixels

DEMO_FOLDER = Path(__file__).parents[1] / "assets" / "demo_vae"


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeSettings:
    """Settings of decoding on a device.

    Attributes:
        device: As torch names it: "cpu", "cuda:0".
        bytes_max: Weights that stay loaded; the least recently used leave.
        decode_bytes: An image that takes more to decode is decoded in tiles.
        dtype: Number format; one of `core.precision.CHOICES`.
    """

    device: str = "cpu"
    bytes_max: int = 2 << 30
    decode_bytes: int = 4 << 30
    dtype: str = RECORD


class DiffusersVaes:
    """The `VaeRunner` port. VAEs are loaded when they are first needed, and torch with the first of them.

    Args:
        weights: VAEs by the digest of their weights (`find_weights`).
        engine: Runs them.
        settings: Of the device.
        streams: Returns a stream of copies of a device; one is for latents, one for pixels.
    """

    def __init__(
        self,
        weights: Mapping[str, Weights],
        engine: DecodeEngine,
        settings: VaeSettings,
        streams: Callable[[Any], CopyStream] = copy_stream,
    ) -> None:
        self.engine = engine
        self._settings = settings
        self._known = dict(weights)
        self._streams = streams
        self._loaded: OrderedDict[str, LoadedVae] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def build(self) -> str:
        return self._build_with(self.engine.name)

    @property
    def lanes(self) -> int:
        return 2 if self._settings.device.startswith("cuda") else 1

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

    def decode(self, latents: Sequence[npt.NDArray[np.float32]], info: LatentInfo) -> Decoded:
        """Decode a batch. Raises `VaeUnknown`, `DeviceFull`, `RecordInvalid`."""
        with self._lock, self._on_device(), self._memory_for(latents):
            batch = self._begin(latents, info)
        batch.copied.synchronize()
        return Decoded(list(batch.pixels.numpy()), batch.seconds(), batch.build)

    def encode(self, pixels: Pixels, weights_sha256: str) -> npt.NDArray[np.float32]:
        """Encode an image. Raises `VaeUnknown`, `PictureTooLarge`."""
        import torch

        height, width = pixels.shape[:2]
        info = LatentInfo((1, 1, 1), "float16", Vae("", "", weights_sha256), height, width, Normalisation())
        with self._lock, self._on_device(), torch.inference_mode():
            loaded = self._load(info)
            if (needed := height * width * loaded.pixel_bytes) > self._settings.decode_bytes:
                message = f"{height} × {width} need some {needed >> 20} MiB, more than QUIRE_DECODER_DECODE_BYTES"
                raise PictureTooLarge(message, field="body")
            tensor = torch.from_numpy(pixels).to(self._device).permute(2, 0, 1)[None].to(loaded.dtype) / 127.5 - 1
            encoded = loaded.encode(tensor[:, :, None] if loaded.kind.frames else tensor)
            latent = (encoded[:, :, 0] if loaded.kind.frames else encoded)[0]
            return np.asarray(latent.float().cpu().numpy(), dtype=np.float32)

    def close(self) -> None:
        self.engine.close()

    # ----

    @cached_property
    def _device(self) -> Any:
        import torch

        return torch.device(self._settings.device)

    @cached_property
    def _copies(self) -> tuple[CopyStream, CopyStream]:
        return self._streams(self._device), self._streams(self._device)

    @cached_property
    def _facts(self) -> tuple[str, str]:
        """Facts that decide the pixels besides the engine: of the machine, and of the configuration."""
        name = "cpu"
        if self._settings.device.startswith("cuda"):
            import torch

            name = torch.cuda.get_device_name(self._device)
        dtype = "" if self._settings.dtype == RECORD else f", {self._settings.dtype}"
        machine = f"torch {version('torch')}, diffusers {version('diffusers')}, {name}"
        return machine, f"tiles above {self._settings.decode_bytes >> 20} MiB{dtype}"

    def _build_with(self, engine: str) -> str:
        machine, settings = self._facts
        return f"{machine}, {engine}, {settings}"

    def _begin(self, latents: Sequence[npt.NDArray[np.float32]], info: LatentInfo) -> _Batch:
        """Begin all work of a batch. It runs after that of earlier batches; only copies overlap with it."""
        import torch

        loaded, latent = self._load(info), latents[0]
        kind, scale = loaded.kind, loaded.kind.scale
        if latent.shape[0] != kind.channels:
            raise RecordInvalid(f"{latent.shape[0]} channels, the VAE has {kind.channels}", field="shape")
        if (latent.shape[1] * scale, latent.shape[2] * scale) != (info.height, info.width):
            raise RecordInvalid(f"{latent.shape} makes ×{scale}, not {info.height} × {info.width}", field="shape")
        self.engine.begin()
        into, out_of = self._copies
        is_cuda = self._device.type == "cuda"
        with torch.inference_mode():
            staged = torch.from_numpy(np.stack(latents))
            staged = staged.pin_memory() if is_cuda else staged
            arriving: list[Any] = []  # allocated by the copy's stream: that of the decoder has its own memory
            into.order(into.submit(lambda: arriving.append(staged.to(self._device, copy=True, non_blocking=True))))
            clock = _DeviceClock(self._device)
            tensor = arriving[0].to(loaded.dtype)
            samples = self._decoder(loaded, len(latents), info)(tensor[:, :, None] if kind.frames else tensor)
            decoded = to_pixels(samples[:, :, 0] if kind.frames else samples)
            clock.stop()
        pixels = torch.empty(decoded.shape, dtype=torch.uint8, pin_memory=is_cuda)
        copied = out_of.submit(lambda: _copy(pixels, decoded), dependency=out_of.record())
        return _Batch(pixels, copied, clock.seconds, self._build_with(self.engine.used), (staged, arriving, decoded))

    def _on_device(self) -> Any:
        """Events and graphs are made on the current device."""
        if self._device.type != "cuda":
            return nullcontext()
        import torch

        return torch.cuda.device(self._device)

    @contextmanager
    def _memory_for(self, latents: Sequence[npt.NDArray[np.float32]]) -> Iterator[None]:
        """Raise `DeviceFull` where the device has no memory."""
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if len(latents) == 1:  # a smaller batch may still fit beside what is loaded
                while self._loaded:
                    self._unload()
            if self._device.type == "cuda":
                from quire_decoder.adapters.cuda_graphs import release_memory

                release_memory()
            raise DeviceFull(f"no memory for {len(latents)} latents of {latents[0].shape}") from None

    def _decoder(self, loaded: LoadedVae, count: int, info: LatentInfo) -> Decode:
        """The whole image at once, or in tiles that overlap and are blended. Raises `DeviceFull` for too many."""
        needed, limit = count * info.height * info.width * loaded.pixel_bytes, self._settings.decode_bytes
        if needed <= limit:
            return loaded.decode
        if count > 1:
            raise DeviceFull(
                f"{count} of {info.height} × {info.width} need some {needed >> 20} MiB, more than "
                f"QUIRE_DECODER_DECODE_BYTES ({limit >> 20} MiB)"
            )
        return loaded.tiled

    def _load(self, info: LatentInfo) -> LoadedVae:
        """Return the VAE in its number format for the record."""
        digest, dtype = info.vae.weights_sha256.lower(), info.decode.dtype
        name = f"{digest} {dtype}" if self._settings.dtype == RECORD else digest
        if name in self._loaded:
            self._loaded.move_to_end(name)
            return self._loaded[name]
        weights = self._known.get(digest)
        if weights is None:
            raise VaeUnknown(
                f"no VAE with weights {digest[:16] or '(none named)'}…, of {info.vae.repository}", field="vae"
            )
        loaded = load_vae(weights, self._settings.dtype, dtype, self._device, self.engine)
        while self._loaded and loaded.size + sum(vae.size for vae in self._loaded.values()) > self._settings.bytes_max:
            self._unload()
        self._loaded[name] = loaded
        return loaded

    def _unload(self) -> None:
        """Give up the VAE that was not used for the longest time."""
        name, loaded = self._loaded.popitem(last=False)
        self.engine.forget(name.partition(" ")[0], str(loaded.dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch that was begun. `memory`: read by its copies, and free behind `copied`."""

    pixels: Any
    copied: Event
    seconds: Callable[[], float]
    build: str
    memory: tuple[Any, ...]


class _DeviceClock:
    """Seconds that the device takes for the work from here to `stop`."""

    def __init__(self, device: Any) -> None:
        self._events: list[Any] = []
        self._took_s, self._began_s = 0.0, time.perf_counter()
        if device.type == "cuda":
            import torch

            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record()

    def stop(self) -> None:
        self._took_s = time.perf_counter() - self._began_s
        if self._events:
            self._events[1].record()

    def seconds(self) -> float:
        """Return them, once the work has run."""
        if not self._events:
            return self._took_s
        began, ended = self._events
        return float(began.elapsed_time(ended)) / 1e3


def _copy(into: Any, out_of: Any) -> None:
    into.copy_(out_of, non_blocking=True)


def device_names(device: str) -> list[str]:
    """Return the devices to decode on: all GPUs, one of them, or the processor.

    Torch is not loaded where there can be no CUDA, to save its memory until the first request.

    Args:
        device: "auto", "cpu", "cuda" for all GPUs, "cuda:N" for one.

    Raises:
        ConfigInvalid: A device is not there, or the GPUs are of several kinds: their pixels differ.
    """
    if device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists()):
        return ["cpu"]
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [f"cuda:{number}" for number in range(count)]
    if device == "auto" and not names:
        return ["cpu"]
    if device in names:
        return [device]
    if device not in ("auto", "cuda") or not names:
        raise ConfigInvalid(
            f"QUIRE_DECODER_DEVICE={device!r}: torch finds {', '.join(names) or 'no CUDA device'}; "
            "`auto` takes what there is"
        )
    kinds = sorted({torch.cuda.get_device_name(name) for name in names})
    if len(kinds) > 1:
        raise ConfigInvalid(
            f"QUIRE_DECODER_DEVICE={device!r}: {', '.join(kinds)} make different pixels; name one, as in cuda:0"
        )
    return names
