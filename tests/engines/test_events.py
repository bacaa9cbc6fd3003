"""Quire's events, published as vLLM's: read with vLLM's own classes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from quire.model.events import CacheEvent, EventKind, EventPage
from quire.model.keys import ChunkKeys
from quire_tools.cli.views.events import publisher
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


def test_beyond_this_host_only_known_clients_read(tmp_path: Path) -> None:
    zmq_auth = pytest.importorskip("zmq.auth")
    (tmp_path / "clients").mkdir()
    zmq_auth.create_certificates(tmp_path, "server")
    made = {}
    for name in ("router", "stranger"):
        public, secret = zmq_auth.create_certificates(tmp_path, name)
        made[name] = zmq_auth.load_certificate(secret)
        if name == "router":
            Path(public).rename(tmp_path / "clients" / "router.key")
    (port,) = free_ports(1)
    publish = publisher(f"tcp://*:{port}", "kv", tmp_path)
    server, _ = zmq_auth.load_certificate(tmp_path / "server.key")
    readers = {}
    for name, (public, secret) in made.items():
        readers[name] = reader = zmq.Context.instance().socket(zmq.SUB)
        reader.curve_publickey, reader.curve_secretkey, reader.curve_serverkey = public, secret, server
        reader.setsockopt(zmq.RCVTIMEO, 2000)
        reader.connect(f"tcp://127.0.0.1:{port}")
        reader.setsockopt_string(zmq.SUBSCRIBE, "kv")
    event = CacheEvent(kind=EventKind.REMOVED, holder="a", keys=ChunkKeys(A))
    for at in range(40):  # a subscription is not acknowledged
        publish(EventPage((event,), f"{at}-0"))
        if readers["router"].poll(100):
            break
    assert readers["router"].recv_multipart()[0] == b"kv"
    with pytest.raises(zmq.Again):
        readers["stranger"].recv_multipart()
    for reader in readers.values():
        reader.close(0)
