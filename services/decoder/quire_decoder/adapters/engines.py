"""Ways to run a VAE's decoder on a device. Each has roundings of its own, so its name is part of the build.

eager and channels_last run everywhere, compile where torch finds a compiler, graphs on CUDA, tensorrt where the package
torch_tensorrt is.
"""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Final, Protocol

from quire.model.errors import ConfigInvalid

Decode = Callable[[Any], Any]
"""A batch of latents, on the device, to samples: (N, C, h, w) to (N, 3, H, W)."""

_GRAPHS_MAX: Final = 16


class DecodeEngine(Protocol):
    """Wraps a decoder. `name` identifies its build."""

    name: str

    def prepare(self, vae: Any) -> Decode: ...


class Eager:
    """Plain torch."""

    name = "eager"

    def prepare(self, vae: Any) -> Decode:
        return lambda latents: vae.decode(latents, return_dict=False)[0]


class ChannelsLast:
    """Eager, with the memory order that convolutions of many devices prefer, where the VAE takes planes."""

    name = "channels_last"

    def prepare(self, vae: Any) -> Decode:
        import torch

        if any(weight.dim() > 4 for weight in vae.parameters()):  # of videos: torch has that order for planes alone
            return Eager().prepare(vae)
        vae.to(memory_format=torch.channels_last)
        return lambda latents: vae.decode(latents.contiguous(memory_format=torch.channels_last), return_dict=False)[0]


class Compiled:
    """torch.compile, for each shape anew."""

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = backend
        self.name = f"compile {backend}"
        if backend == "tensorrt":
            if importlib.util.find_spec("torch_tensorrt") is None:
                raise ConfigInvalid("QUIRE_DECODER_ENGINE=tensorrt needs the package torch_tensorrt")
            self.name += f" {version('torch_tensorrt')}"

    def prepare(self, vae: Any) -> Decode:
        import torch

        if self._backend == "tensorrt":
            importlib.import_module("torch_tensorrt")  # registers itself
        backend = "torch_tensorrt" if self._backend == "tensorrt" else self._backend
        compiled: Any = torch.compile(vae.decoder, backend=backend, dynamic=False)
        vae.decoder = compiled
        return Eager().prepare(vae)


class CudaGraphs:
    """A recording of all kernels, by shape, replayed in one call: no launch is waited for. Needs CUDA."""

    name = "graphs"

    def prepare(self, vae: Any) -> Decode:
        import torch

        # Contiguous: on an H200 convolutions with channels_last take half as long again (docs/evaluation.md).
        eager = Eager().prepare(vae)
        graphs: OrderedDict[tuple[int, ...], tuple[Any, Any, Any]] = OrderedDict()

        def record(latents: Any) -> tuple[Any, Any, Any]:
            inputs = latents.clone()
            stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):  # libraries choose their algorithms before anything is recorded
                    eager(inputs)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                sample = eager(inputs)
            return graph, inputs, sample

        def decode(latents: Any) -> Any:
            shape = tuple(latents.shape)
            if shape not in graphs:
                if len(graphs) >= _GRAPHS_MAX:
                    graphs.popitem(last=False)
                graphs[shape] = record(latents)
            graphs.move_to_end(shape)
            graph, inputs, sample = graphs[shape]
            inputs.copy_(latents)
            graph.replay()
            return sample.clone()

        return decode


def make_engine(name: str, device_type: str) -> DecodeEngine:
    """Return an engine by its name in the configuration; "auto": graphs on CUDA, else channels_last.

    Raises `ConfigInvalid`.
    """
    if name == "auto":
        name = "graphs" if device_type == "cuda" else "channels_last"
    if name == "graphs" and device_type != "cuda":
        raise ConfigInvalid(f"QUIRE_DECODER_ENGINE=graphs needs CUDA, the device is {device_type}")
    engines: dict[str, Callable[[], DecodeEngine]] = {
        "eager": Eager,
        "channels_last": ChannelsLast,
        "compile": Compiled,
        "graphs": CudaGraphs,
        "tensorrt": lambda: Compiled("tensorrt"),
    }
    if name not in engines:
        raise ConfigInvalid(f"QUIRE_DECODER_ENGINE={name!r}; there are auto, {', '.join(engines)}")
    return engines[name]()
