"""A GPU, or in its place the CPU: memory, streams and a clock, so that the same measurement runs on both."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from quire.model.errors import ConfigInvalid


class Device:
    """`name`: cuda, cpu, or auto for the better one. Raises `ConfigInvalid` for CUDA where there is none."""

    def __init__(self, name: str) -> None:
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        if name not in ("cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
            raise ConfigInvalid(f"--device {name!r}: torch {torch.__version__} has no such device here", field="device")
        self.is_cuda = name == "cuda"
        self.torch = torch.device(name)
        self.description = torch.cuda.get_device_name() if self.is_cuda else "the CPU, no GPU"

    def host(self, length: int) -> torch.Tensor:
        """Bytes of host memory; pinned where there is a GPU to copy to."""
        return torch.zeros(length, dtype=torch.uint8, pin_memory=self.is_cuda)

    def memory(self, length: int) -> torch.Tensor:
        """Bytes of the device's memory."""
        return torch.zeros(length, dtype=torch.uint8, device=self.torch)

    def synchronize(self) -> None:
        """Return when the device has done all it was given."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        """What `work` takes, by CUDA events where there are such."""
        self.synchronize()
        if not self.is_cuda:
            began = time.perf_counter()
            work()
            return time.perf_counter() - began
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def copies(self) -> Copies:
        return Copies(self.is_cuda)


class Copies:
    """Copies from the host beside what the device computes: on a stream of their own, where there are streams."""

    def __init__(self, is_cuda: bool) -> None:
        self._stream: Any = torch.cuda.Stream() if is_cuda else None  # type: ignore[no-untyped-call, unused-ignore]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._on_stream():
            target.copy_(source, non_blocking=True)

    def before_compute(self) -> None:
        """What the device computes from now on sees what was copied until now."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
