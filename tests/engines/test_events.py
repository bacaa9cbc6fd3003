"""Quire's events, published as vLLM's: read with vLLM's own classes."""

from __future__ import annotations

import time

import pytest

from quire.model.events import CacheEvent, EventKind, EventPage
from quire.model.keys import ChunkKeys
from quire_tools.cli.events import publisher
from quire_tools.local.ports import free_ports

msgspec = pytest.importorskip("msgspec", reason="not installed here: `make test-engines` installs it, and vLLM")
zmq = pytest.importorskip("zmq", reason="not installed here: `make test-engines` installs it, and vLLM")

A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))


def test_vllm_reads_what_is_published() -> None:
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

    (port,) = free_ports(1)
    publish = publisher(f"tcp://127.0.0.1:{port}", "kv@quire")
    reader = zmq.Context.instance().socket(zmq.SUB)
    reader.setsockopt(zmq.RCVTIMEO, 10_000)
    reader.connect(f"tcp://127.0.0.1:{port}")
    reader.setsockopt_string(zmq.SUBSCRIBE, "kv@quire")
    time.sleep(0.5)  # a subscription is not acknowledged
    keys = ChunkKeys(A + B + C)
    stored = CacheEvent(kind=EventKind.STORED, holder="storage-1", keys=keys, parents=bytes(32) + A + bytes(32))
    removed = CacheEvent(kind=EventKind.REMOVED, holder="@object", keys=ChunkKeys(C))
    publish(EventPage((), "1-0"))
    publish(EventPage((stored,), "2-0"))
    publish(EventPage((removed,), "3-0", lost=True))
    topic, number, payload = reader.recv_multipart()
    assert (topic, int.from_bytes(number, "big")) == (b"kv@quire", 0), "an empty page is none"
    first, second = msgspec.msgpack.decode(payload, type=KVEventBatch).events
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert (first.block_hashes, first.parent_block_hash) == ([A, B], None)
    assert (second.block_hashes, second.parent_block_hash) == ([C], None)
    assert (first.medium, first.locality, first.ownership) == ("QUIRE", "REMOTE", "storage-1")
    _, number, payload = reader.recv_multipart()
    cleared, gone = msgspec.msgpack.decode(payload, type=KVEventBatch).events
    assert isinstance(cleared, AllBlocksCleared) and isinstance(gone, BlockRemoved)
    assert (gone.block_hashes, gone.medium, gone.ownership) == ([C], "STORAGE", "@object")
    assert int.from_bytes(number, "big") == 1
    reader.close()
