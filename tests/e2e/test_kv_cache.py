"""The upper level of the blocking client: keys and values by tokens, of numpy and torch; aborted stores and loads."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import quire
from quire import AsyncClient, Client, KvLayout, Namespace, QuireError, block_keys
from quire.client import KvCache
from quire.client.kv_arrays import pack_layer
from quire.model.errors import InvalidRequest
from quire_tools.local import LocalCluster
from tests.polling import until

_LAYERS, _HEADS, _DIM = 4, 2, 8
_TOKENS = list(range(70))  # four chunks, and a rest


def _layout(dtype: str = "fp16", attention: str = "kv_heads") -> KvLayout:
    return KvLayout(_LAYERS, 16, _HEADS if attention == "kv_heads" else 1, _DIM, dtype, attention)


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster.gateway_address) as client:
        yield client


def _cache(client: Client, layout: KvLayout | None = None) -> KvCache:
    return client.cache("test", os.urandom(8).hex(), layout or _layout())


def _numpy_layers(seed: int = 0) -> list[tuple[Any, Any]]:
    random = np.random.default_rng(seed)
    shape = (len(_TOKENS), _HEADS, _DIM)
    return [tuple(random.standard_normal(shape).astype(np.float16) for _ in range(2)) for _ in range(_LAYERS)]  # type: ignore[misc]


async def test_the_same_with_asyncio(cluster: LocalCluster) -> None:
    layers = _numpy_layers()
    async with AsyncClient(cluster.gateway_address) as client:
        cache = client.cache("test", os.urandom(8).hex(), _layout())
        assert (await cache.put(_TOKENS, layers)).stored_chunks == 4
        assert await cache.matched_tokens(_TOKENS) == 64
        prefix = cache.get(_TOKENS)
        with pytest.raises(InvalidRequest, match="not fetched yet"):
            await anext(aiter(prefix))
        async with prefix:
            got = [layer async for layer in prefix]
        for (keys, values), (put_keys, put_values) in zip(got, layers, strict=True):
            assert np.array_equal(keys.reshape(64, _HEADS, _DIM), put_keys[:64])
            assert np.array_equal(values.reshape(64, _HEADS, _DIM), put_values[:64])
        async with cache.get([1, 2, 3]) as prefix:
            assert [layer async for layer in prefix] == []
        assert await cache.evict(_TOKENS) == 4, "no lease is left"


async def test_a_put_that_is_cancelled_frees_its_memory_when_the_copy_has_ended(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that copies a layer cannot be stopped: memory that is freed under it would be another's."""
    copying, go_on, open_ = threading.Event(), threading.Event(), list[Any]()

    def slow(*arguments: Any) -> None:
        copying.set()
        assert go_on.wait(10) and open_, "the memory is freed"
        pack_layer(*arguments)

    monkeypatch.setattr("quire.client.cache.pack_layer", slow)
    async with AsyncClient(cluster.gateway_address) as client:
        transport: Any = client.transport
        register = transport.register
        monkeypatch.setattr(transport, "register", lambda memory: _Counted(register(memory), open_))
        cache = client.cache("test", os.urandom(8).hex(), _layout())
        putting = asyncio.ensure_future(cache.put(_TOKENS, _numpy_layers()))
        assert await asyncio.to_thread(copying.wait, 10)
        putting.cancel()
        await asyncio.wait([putting], timeout=0.2)
        assert not putting.done() and len(open_) == 1
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert open_ == []


def test_what_was_put_is_got(client: Client) -> None:
    cache, layers = _cache(client), _numpy_layers()
    with cache.get(_TOKENS) as prefix:
        assert (prefix.tokens, list(prefix)) == (0, [])
    assert cache.matched_tokens(_TOKENS) == 0
    assert cache.put(_TOKENS, layers).stored_chunks == 4
    assert cache.put(_TOKENS, layers).stored_chunks == 0, "they are there already"
    assert cache.matched_tokens(_TOKENS) == 64
    with cache.get([*_TOKENS[:40], *range(1000, 1040)]) as prefix:
        assert prefix.tokens == 32
        for (keys, values), (put_keys, put_values) in zip(prefix, layers, strict=True):
            assert keys.shape == (2, 16, _HEADS, _DIM) and keys.base is not None
            assert np.array_equal(keys.reshape(32, _HEADS, _DIM), put_keys[:32])
            assert np.array_equal(values.reshape(32, _HEADS, _DIM), put_values[:32])
    assert [len(list(cache.get(_TOKENS))), len(list(cache.get([1, 2, 3])))] == [_LAYERS, 0], "also without a block"
    assert cache.evict(_TOKENS) == 4 and cache.matched_tokens(_TOKENS) == 0, "no lease is left"


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "float8_e4m3fn"])
def test_tensors_of_torch(client: Client, dtype: str) -> None:
    layout = _layout(dtype)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(dtype, torch.float8_e4m3fn)
    layers = torch.randn(_LAYERS, 2, len(_TOKENS), _HEADS, _DIM).to(kind)
    cache = _cache(client, layout)
    cache.put(_TOKENS, list(layers))
    with cache.get(_TOKENS, framework="torch") as prefix:
        for got, put in zip(prefix, layers, strict=True):
            for states, expected in zip(got, put, strict=True):
                assert states.dtype is kind
                assert torch.equal(states.reshape(64, _HEADS, _DIM).float(), expected[:64].float())
    with cache.get(_TOKENS) as prefix:
        bits = [layer[0].dtype.name for layer in prefix]
    assert set(bits) == {{"fp32": "float32", "bf16": "uint16"}.get(dtype, "uint8")}
    with _cache(client, layout).get(_TOKENS) as prefix, pytest.raises(InvalidRequest, match="0 cached tokens"):
        prefix.layer(0)


def test_latent_attention_has_one_plane(client: Client) -> None:
    cache = _cache(client, _layout("fp16", "mla"))
    latents = [np.full((64, 1, _DIM), layer, np.float16) for layer in range(_LAYERS)]
    cache.put(_TOKENS, latents)
    for number, (got,) in enumerate(cache.get(_TOKENS)):
        assert got.shape == (4, 16, 1, _DIM) and np.all(got == number)


def _wrong_layers() -> dict[str, tuple[Any, str]]:
    right = _numpy_layers()
    return {
        "a layer too few": (right[:-1], "3 layers; the layout has 4"),
        "no sequence": (iter(right), "list_iterator; the layout has 4"),
        "keys alone": ([(keys,) for keys, _ in right], "1 arrays; keys and values"),
        "heads first": ([(k.swapaxes(0, 1), v) for k, v in right], r"shape \(2, 70, 8\); \(tokens, 2, 8\) or"),
        "too few tokens": ([(k[:40], v) for k, v in right], "40 tokens; the prompt has 70, its whole chunks 64"),
        "a batch": ([(np.stack([k, k]), np.stack([v, v])) for k, v in right], r"shape \(2, 70, 2, 8\)"),
        "another prompt's": ([(np.concatenate([k, k]), v) for k, v in right], "140 tokens; the prompt has 70"),
        "nothing": ([None] * _LAYERS, "a NoneType; arrays are wanted"),
        "a dictionary": (dict(enumerate(right)), "a dict; the layout has 4"),
        "another type": ([(k.astype(np.float32), v) for k, v in right], "elements are float32; the layout has fp16"),
        "lists": ([(k.tolist(), v) for k, v in right], r"shape \(\)"),
        "a wrong last one": ([*right[:-1], (right[-1][0][:8], right[-1][1])], r"layers\[3\]: 8 tokens"),
    }


@pytest.mark.parametrize("name", _wrong_layers())
def test_wrong_layers_are_refused_and_nothing_is_stored(client: Client, name: str) -> None:
    cache, (layers, why) = _cache(client), _wrong_layers()[name]
    with pytest.raises(InvalidRequest, match=why):
        cache.put(_TOKENS, layers)
    assert cache.matched_tokens(_TOKENS) == 0
    assert cache.put(_TOKENS, _numpy_layers()).stored_chunks == 4, "the keys are free again"
    with pytest.raises(InvalidRequest, match="'jax'; there are numpy, torch"):
        cache.get(_TOKENS, framework="jax")


def test_a_prefix_is_fetched_once_and_says_so(client: Client) -> None:
    cache = _cache(client)
    cache.put(_TOKENS, _numpy_layers())
    prefix = cache.get(_TOKENS, framework="NumPy")
    with pytest.raises(InvalidRequest, match="not fetched yet: use `with"):
        _ = prefix.tokens
    with prefix:
        assert prefix.tokens == 64
    with pytest.raises(InvalidRequest, match="call `get` again"), prefix:
        pass


def test_a_fetch_that_failed_has_no_layers(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typed error: programs compute the prompt then."""
    cache = _cache(client)
    cache.put(_TOKENS, _numpy_layers())
    prefix = cache.get(_TOKENS)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(client, "fetch", lambda *arguments: 1 // 0)
        prefix.__enter__()
    with pytest.raises(InvalidRequest, match="layers of 64 cached tokens"):
        prefix.layer(0)
    until(lambda: cache.evict(_TOKENS) == 4, "the lease is still held")


def test_a_client_that_does_not_run_says_so(cluster: LocalCluster) -> None:
    """It waited for two minutes, and then named a deadline."""
    client = Client(cluster.gateway_address)
    with pytest.raises(InvalidRequest, match="not started: use `with Client"):
        client.status()
    client.close()
    with client:
        loop = iter(_cache(client).get(_TOKENS))
        assert next(loop, None) is None
    with pytest.raises(InvalidRequest, match="it is closed; make another one"):
        client.status()
    with pytest.raises(InvalidRequest, match="make another one"), client:
        pass


def test_a_loop_that_the_collector_ends_on_the_clients_thread(client: Client) -> None:
    """As one that an exception's traceback keeps in a cycle: nobody waits for it there."""
    cache = _cache(client)
    cache.put(_TOKENS, _numpy_layers())
    loop = iter(cache.get(_TOKENS))
    next(loop)
    client.on_loop(loop.close)  # type: ignore[attr-defined]
    until(lambda: cache.evict(_TOKENS) == 4, "the lease is still held")


def test_what_ends_a_wait_ends_the_work(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while memory is lent: the work has ended when the exception goes on."""
    begun, ended = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    def interrupted(self: Any, timeout: float | None = None) -> Any:
        assert begun.wait(10)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("concurrent.futures.Future.result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.run(work())
    assert ended.is_set()


def test_layers_that_are_missing_end_the_store(client: Client) -> None:
    """They were waited for until the deadline."""
    cache = _cache(client)
    keys = block_keys(cache.namespace, _TOKENS)
    memory = client.allocate(cache.namespace.layout.payload_bytes(len(keys)))
    with (
        pytest.raises(InvalidRequest, match=r"layers \[3\] of 4 were not announced"),
        client.store(cache.namespace, keys, 0, memory) as store,
    ):
        for layer in range(3):
            store.layer_ready(layer)
        with pytest.raises(InvalidRequest, match="99; there are 4 layers"):
            store.layer_ready(99)
    assert not memory.is_busy and cache.matched_tokens(_TOKENS) == 0
    client.free(memory)


async def test_a_store_of_asyncio_commits_at_the_end_of_its_block(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.gateway_address) as client:
        namespace = Namespace("test", os.urandom(8).hex(), _layout())
        keys = block_keys(namespace, _TOKENS)
        memory = client.allocate(namespace.layout.payload_bytes(len(keys)))
        async with await client.store(namespace, keys, 0, memory) as store:
            for layer in range(_LAYERS):
                store.layer_ready(layer)
        assert not memory.is_busy and (await client.lookup(namespace, keys, lease_ttl_ms=0)).matched_chunks == 4
        memory.close()


def test_a_store_that_an_exception_ends_stores_nothing(client: Client) -> None:
    cache = _cache(client)
    keys = block_keys(cache.namespace, _TOKENS)
    memory = client.allocate(cache.namespace.layout.payload_bytes(len(keys)))
    with pytest.raises(ZeroDivisionError), client.store(cache.namespace, keys, 0, memory) as store:
        store.layer_ready(0)
        raise ZeroDivisionError
    assert not memory.is_busy and cache.matched_tokens(_TOKENS) == 0
    with client.store(cache.namespace, keys, 0, memory) as store:
        for layer in range(_LAYERS):
            store.layer_ready(layer)
    assert not memory.is_busy and store.commit().stored_chunks == 4
    client.free(memory)


class _Counted:
    """A registered region that is in `open_` until it is closed."""

    def __init__(self, region: Any, open_: list[Any]) -> None:
        self._region = region
        self._open = open_
        open_.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._region, name)

    def close(self) -> None:
        self._open.remove(self)
        self._region.close()


def test_a_hundred_loads_that_are_left_early_leave_nothing_behind(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases and memory are back: everything can be evicted at once, and as much memory is registered as before."""
    cache, tokens = _cache(client), list(range(16 * 64))
    transport: Any = client.asynchronous.transport
    register, open_ = transport.register, list[Any]()
    monkeypatch.setattr(transport, "register", lambda memory: _Counted(register(memory), open_))
    layers = [(np.ones((len(tokens), _HEADS, _DIM), np.float16),) * 2] * _LAYERS
    cache.put(tokens, layers)
    for number in range(100):
        with cache.get(tokens) as prefix:
            if number % 2:
                prefix.layer(0)
    until(lambda: cache.evict(tokens) == 64, "a lease or a transfer still holds chunks", timeout_s=30.0)
    assert open_ == [], "memory is still registered"
    cache.put(tokens, layers)
    assert sum(1 for _ in cache.get(tokens)) == _LAYERS


def test_the_cluster_being_away_is_one_typed_error() -> None:
    with Client("127.0.0.1:1", timeout_s=2.0) as client, pytest.raises(QuireError):
        next(iter(_cache(client).get(_TOKENS)))


def test_the_package_names_what_programs_need() -> None:
    assert {"Client", "AsyncClient", "Namespace", "KvLayout", "block_keys"} <= set(quire.__all__)
    for name in quire.__all__:
        assert getattr(quire, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        quire.nothing  # noqa: B018
