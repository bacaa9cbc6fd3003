"""The data plane by UCX, by shared memory, by the nearer of both, and the fake, which passes what they pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from quire.testing.contracts import TransportContract
from quire.transport import SharedMemoryTransport, Transport, data_plane
from quire.transport.memory import MemoryTransport
from quire.transport.ucx import UcxTransport


class TestTransport(TransportContract):
    @pytest.fixture(params=[MemoryTransport, UcxTransport, SharedMemoryTransport, data_plane])
    def transport(self, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Transport]:
        if request.param in (SharedMemoryTransport, data_plane):
            return partial(request.param, tmp_path)
        return cast(Callable[[], Transport], request.param)
