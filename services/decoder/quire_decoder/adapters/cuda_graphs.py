"""Recordings of CUDA kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from quire_decoder.adapters.engines import Decode

_TRIALS: Final = 2
"""Libraries choose their algorithms in the first runs, which are not recorded."""


@dataclass(frozen=True, slots=True)
class CudaRecording:
    """A graph, with the memory that it reads and writes. `size`: bytes that it keeps."""

    graph: Any
    inputs: Any
    samples: Any
    size: int

    def replay(self, latents: Any) -> Any:
        """Decode other latents of the same shape."""
        self.inputs.copy_(latents)
        self.graph.replay()
        return self.samples.clone()


def record(decode: Decode, latents: Any) -> CudaRecording:
    """Record a decode with latents of a shape; on the current device."""
    inputs = latents.clone()
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_TRIALS):
            decode(inputs)
    torch.cuda.current_stream().wait_stream(stream)
    reserved = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # another thread may wait for an earlier batch
        samples = decode(inputs)
    return CudaRecording(graph, inputs, samples, torch.cuda.memory_reserved() - reserved)


def released() -> None:
    """Return the memory of discarded recordings to the device."""
    torch.cuda.empty_cache()
