"""Copies between CUDA memory and pinned host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from quire.telemetry import logger
from quire.transport.devices import Bytes, Event


class CudaStream:
    """A CUDA stream next to the engine's. Events order the two on the device; no call blocks but `synchronize`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pin(self, memory: Bytes) -> None:
        status = int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))  # type: ignore[no-untyped-call]
        if status:
            logger().warning("CUDA cannot pin staging memory: copies are slower", bytes=memory.nbytes, error=status)

    def record(self) -> Event:
        return self._event(torch.cuda.current_stream(self._device))

    def submit(self, copies: Callable[[], None], dependency: Event | None = None) -> Event:
        with torch.cuda.stream(self._stream):
            if dependency is not None:
                self._stream.wait_event(cast(Any, dependency))
            copies()
            return self._event(self._stream)

    def order(self, event: Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(cast(Any, event))

    def _event(self, stream: torch.cuda.Stream) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return cast(Event, event)
