"""The order of copies and SGLang's forward pass. SGLang itself is not here: its two classes have stand-ins."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.client import Buffer
from quire.integrations.staging import StagingPool
from quire.model.hashing import Namespace
from quire.model.layout import Dtype, KvLayout
from quire.testing.devices import LateDevice
from quire.transport.memory import MemoryTransport
from tests.unit.quire.late_engine import LoopClient, NoAfter, TooEarly

LAYERS, PAGE, PAGES = 3, 4, 2
OLD, NEW = 5, 7
SPACE = Namespace("m", "w", KvLayout(LAYERS, PAGE, 1, 8, Dtype.FP8_E4M3))
SLOTS = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3])


class _Counter:
    """Reads a layer's pages once they are complete, as the forward pass does."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._buffers = buffers
        self.read: list[torch.Tensor] = []
        self.failures: list[Exception] = []

    def complete(self, index: int, layer: int) -> None:
        self.read.append(self._buffers[layer][SLOTS].clone())

    def fail(self, index: int, error: Exception) -> None:
        self.failures.append(error)


@pytest.fixture
def linker_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The linker, above stand-ins for the modules of SGLang that it imports."""
    storage, linker = ModuleType("hicache_storage"), ModuleType("unified_cache_linker")
    storage.PoolName = SimpleNamespace(KV="kv")  # type: ignore[attr-defined]
    linker.LayerWiseLoadCounter = linker.UnifiedCacheLinker = type("StandIn", (), {})  # type: ignore[attr-defined]
    package = "sglang.srt.mem_cache"
    for name in ("sglang", "sglang.srt", package, f"{package}.unified_cache"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, f"{package}.hicache_storage", storage)
    monkeypatch.setitem(sys.modules, f"{package}.unified_cache.unified_cache_linker", linker)
    monkeypatch.delitem(sys.modules, "quire.integrations.sglang.linker", raising=False)
    from quire.integrations.sglang import linker as module

    yield module
    sys.modules.pop("quire.integrations.sglang.linker", None)


def _loaded(module: Any, device: LateDevice) -> tuple[_Counter, torch.Tensor]:
    """Load two pages while the forward pass still reads old ones; return the counter, and the old ones as read."""
    buffers = [torch.full((16, 1, 8), OLD, dtype=torch.uint8) for _ in range(2 * LAYERS)]
    counter = _Counter(buffers[:LAYERS])
    linker = object.__new__(module.QuireLinker)
    linker._kv = SimpleNamespace(k_buffer=buffers[:LAYERS], v_buffer=buffers[LAYERS:])
    linker._page, linker._space, linker._copies = PAGE, SPACE, device
    linker._settings = SimpleNamespace(timeout_s=10.0)
    linker.layer_done_counter = counter
    linker._pool = StagingPool(Buffer.allocate(MemoryTransport(), 1 << 16))
    part = linker._pool.take(SPACE.layout.payload_bytes(PAGES))
    assert part is not None
    payload = np.full((LAYERS, PAGES, SPACE.layout.slice_bytes), NEW, dtype=np.uint8)
    part.layers(*payload.shape)[:] = payload
    client = LoopClient(payload)
    load = module._Load(part, client.delivery(), SLOTS, PAGES)
    old_pages = torch.zeros(len(SLOTS), 1, 8, dtype=torch.uint8)
    device.engine.add(lambda: old_pages.copy_(buffers[0][SLOTS]))
    asyncio.run(linker._follow(0, [load], device.record()))
    client.close()
    assert not counter.failures
    device.engine.run_all()
    return counter, old_pages


def test_a_layer_is_complete_when_its_copy_has_run(linker_module: Any) -> None:
    counter, old_pages = _loaded(linker_module, LateDevice())
    assert len(counter.read) == LAYERS and all((pages == NEW).all() for pages in counter.read)
    assert (old_pages == OLD).all()


def test_a_layer_that_is_complete_too_early_is_found(linker_module: Any) -> None:
    """The layer was complete when its copy had begun: the order until this was tested."""
    counter, _ = _loaded(linker_module, TooEarly())
    assert not all((pages == NEW).all() for pages in counter.read)


def test_a_copy_over_pages_that_are_still_read_is_found(linker_module: Any) -> None:
    _, old_pages = _loaded(linker_module, NoAfter())
    assert not (old_pages == OLD).all()
