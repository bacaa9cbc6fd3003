"""The object tier in a folder by obstore, in memory, and the simulator's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.testing.contracts import ObjectTierContract
from quire.testing.objects import MemoryObjects
from quire.testing.simulation import SimObjects
from quire_storage.adapters.objects import ObstoreTier
from quire_storage.ports import ObjectTier


class TestObjectTier(ObjectTierContract):
    @pytest.fixture(params=["obstore", "memory", "simulated"])
    def tier(self, request: pytest.FixtureRequest, tmp_path: Path) -> ObjectTier:
        if request.param == "obstore":
            return ObstoreTier(str(tmp_path), 5.0)
        if request.param == "memory":
            return MemoryObjects()
        loop = SimpleNamespace(random=SimpleNamespace(uniform=lambda low, high: 0.0))
        return SimObjects(cast(Any, loop))
