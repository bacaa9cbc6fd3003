"""Copies between storage nodes: memory that a silent node may still write to is never given back."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import numpy as np

from quire.errors import NodeUnavailable
from quire.metadata.index import ChunkRecord
from quire.nodes import Node, Role
from quire_storage.config import StorageConfig
from quire_storage.core.chunks import Chunk
from quire_storage.replication import Replicator


class _Region:
    """A registration that, unlike UCX's, keeps nothing alive."""

    address, remote_key = 4096, b"key"

    def __init__(self, buffer: Any) -> None:
        self.length = buffer.nbytes
        self.closed = False

    def close(self) -> None:
        self.closed = True


class _Transport:
    address = b"node"

    def __init__(self) -> None:
        self.regions: list[_Region] = []
        self.memories: list[weakref.ref[Any]] = []

    def register(self, buffer: Any) -> _Region:
        self.regions.append(_Region(buffer))
        self.memories.append(weakref.ref(buffer.base))
        return self.regions[-1]


class _SilentPeers:
    async def deliver(self, *_: Any) -> Any:
        raise NodeUnavailable("no answer")


class _Clock:
    def now_ms(self) -> int:
        return 1_000


def _replicator(transport: _Transport) -> Replicator:
    config, none = StorageConfig(cluster_secret="s"), cast(Any, None)
    parts: Any = (config, none, transport, none, none, _SilentPeers(), _Clock(), none)
    return Replicator(*parts)


async def test_memory_of_a_copy_that_a_silent_node_may_still_write_stays_mapped() -> None:
    """Finding 4: the region was unmapped at once, and the next mapping of that size got its address."""
    transport = _Transport()
    replicator = _replicator(transport)
    chunk = Chunk(ChunkRecord(b"k" * 32, b"", b"k" * 32, b""), 2, 64, np.zeros(2, dtype=np.uint32))
    source = Node("storage-1", Role.STORAGE, "", b"", "", 1)
    assert [pair async for pair in replicator._land(source, [chunk])] == []
    gc.collect()
    assert not transport.regions[0].closed
    assert transport.memories[0]() is not None


async def test_quarantined_memory_is_bounded() -> None:
    """A node that stays silent costs a bounded amount of memory: then nothing more is lent to it."""
    transport = _Transport()
    replicator = _replicator(transport)
    chunk = Chunk(ChunkRecord(b"k" * 32, b"", b"k" * 32, b""), 2, 64, np.zeros(2, dtype=np.uint32))
    source = Node("storage-1", Role.STORAGE, "", b"", "", 1)
    for _ in range(20):
        assert [pair async for pair in replicator._land(source, [chunk])] == []
    assert len(transport.regions) == 16
