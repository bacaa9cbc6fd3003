"""The data plane on UCX, and the fake in memory, which earns its trust by passing what UCX passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from quire.testing.contracts import TransportContract
from quire.transport import Transport
from quire.transport.memory import MemoryTransport
from quire.transport.ucx import UcxTransport


class TestTransport(TransportContract):
    @pytest.fixture(params=[MemoryTransport, UcxTransport])
    def transport(self, request: pytest.FixtureRequest) -> Callable[[], Transport]:
        return cast(Callable[[], Transport], request.param)
