"""Recordings of CUDA kernels."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Final

import torch

from quire_decoder.adapters.engines import Decode

_ONE_AT_A_TIME: Final = threading.Lock()
"""Torch records at most one graph of a process at a time, and empties no cache meanwhile."""
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
    with _ONE_AT_A_TIME:
        inputs = latents.clone()
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_TRIALS):
                decode(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # memory of the trials would count as given back by the graph
        reserved = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        # A stream of this device: torch's own one is of the device that recorded first. Another thread may wait for an
        # earlier batch, which only its own capture would forbid.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            samples = decode(inputs)
        return CudaRecording(graph, inputs, samples, max(0, torch.cuda.memory_reserved() - reserved))


def release_memory() -> None:
    """Return the memory of discarded recordings to the device."""
    with _ONE_AT_A_TIME:
        torch.cuda.empty_cache()
