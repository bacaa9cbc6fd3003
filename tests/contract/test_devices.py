"""Copies between an engine's memory and host memory: the host's, the late device, and CUDA where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quire.testing.contracts import CopyStreamContract
from quire.testing.contracts.devices import Engine
from quire.testing.devices import LateDevice
from quire.transport.devices import Event, HostStream, copy_stream
from tests.unit.quire.late_engine import NoAfter, NoOrder, TooEarly

_SHAPE = (64, 64 << 10)


def _late(device: LateDevice) -> Engine:
    memory = torch.zeros(_SHAPE, dtype=torch.uint8)
    return Engine(device, memory, device.engine.add, device.engine.run_all)


def _on(name: str) -> Engine:
    if name == "late":
        return _late(LateDevice())
    if name == "host":
        return Engine(HostStream(), torch.zeros(_SHAPE, dtype=torch.uint8), lambda work: work(), lambda: None)
    device = torch.device("cuda")
    memory = torch.zeros(_SHAPE, dtype=torch.uint8, device=device)
    return Engine(copy_stream(device), memory, lambda work: work(), torch.cuda.synchronize)


class TestCopyStream(CopyStreamContract):
    @pytest.fixture(params=["host", "late", "cuda"])
    def engine(self, request: pytest.FixtureRequest) -> Engine:
        if request.param == "cuda" and not torch.cuda.is_available():
            pytest.skip("no GPU")
        return _on(request.param)


class _WrongStream(LateDevice):
    """Events are recorded on the engine's stream."""

    def submit(self, copies: Callable[[], None], dependency: Event | None = None) -> Event:
        super().submit(copies, dependency)
        return self.record()


@pytest.mark.parametrize("fault", [NoOrder, NoAfter, _WrongStream, TooEarly])
def test_the_suite_finds_a_fault(fault: type[LateDevice]) -> None:
    failing = []
    for name in (name for name in dir(CopyStreamContract) if name.startswith("test_")):
        suite, engine = CopyStreamContract(), _late(fault())
        staging = CopyStreamContract.staging.__wrapped__(suite, engine)  # type: ignore[attr-defined]
        try:
            getattr(suite, name)(engine, staging)
        except AssertionError:
            failing.append(name)
    assert failing
