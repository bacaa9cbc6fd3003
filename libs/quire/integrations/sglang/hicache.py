"""SGLang's HiCache on Quire: a storage backend under its host pool.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "quire", "module_path": "quire.integrations.sglang", "class_name": "QuireHiCache",
        "interface_v1": 1, "hicache_storage_pass_prefix_keys": true, "gateway": "HOST:PORT"}'

A page is a chunk, and a prefix of pages is a prefix in Quire: one look-up and one delivery for a batch. HiCache's
threads are never raised at: whatever fails is a miss, or not stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
)

from quire.client import Buffer, Client, SlicePlaces
from quire.integrations.circuit_breaker import CircuitBreaker
from quire.integrations.objects import memory_at, plain_layout, retrieve_into
from quire.integrations.settings import check_common, read_settings
from quire.integrations.sglang.naming import configuration_of, namespace_of
from quire.integrations.staging import StagingPool, staged
from quire.model.durability import Durability
from quire.model.errors import ConfigInvalid, QuireError
from quire.model.hashing import Namespace, engine_keys
from quire.model.keys import KEY_BYTES, KEYS_MAX, ChunkKeys
from quire.model.layout import KvLayout
from quire.telemetry import logger

_FLAG: Final = "hicache_storage_backend_extra_config"
_SGLANGS: Final = ("backend_name", "module_path", "class_name", "interface_v1")
_PREFIXES: Final = f"{_FLAG}.hicache_storage_pass_prefix_keys"
_STAGING_BYTES: Final = 256 << 20

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class HiCacheSettings:
    """Settings of `QuireHiCache`; an invalid value raises `ConfigInvalid`, naming the setting.

    `gateway`: host:port. `durability`: of stored pages. `weights`: names the weights; empty for the digest of those
    in the model's folder. `zero_copy`: loads go straight into the host pool; then HiCache's thread waits for a storage
    node that falls silent, for as long as it may still write. Without it they are staged, and end after `timeout_s`.
    `staging_bytes`: registered memory for stores and staged loads. `tenant_salt`: hexadecimal.
    """

    gateway: str = ""
    durability: str = "memory"
    weights: str = ""
    zero_copy: bool = False
    lookup_timeout_s: float = 1.0
    timeout_s: float = 20.0
    away_s: float = 2.0
    staging_bytes: int = _STAGING_BYTES
    tenant_salt: str = ""
    token: str = ""
    zone: str = ""

    def __post_init__(self) -> None:
        check_common(self, _FLAG)


@dataclass(frozen=True, slots=True)
class _Pages:
    """Places of pages in SGLang's host pool: slice l of a page at `offset + l * stride` of its memory."""

    address: int
    length: int
    layout: KvLayout
    stride: int

    @classmethod
    def of(cls, pool: Any) -> _Pages:
        """Take the places from a pool. Raises `ConfigInvalid` if the parts of a page are not evenly spaced."""
        first = pool.get_page_buffer_meta(_tokens(0, pool.page_size))
        last = pool.get_page_buffer_meta(_tokens(pool.page_num - 1, pool.page_size))
        at, sizes = sorted(first[0]), set(first[1])
        strides = {stop - start for start, stop in pairwise(at)}
        layout = plain_layout(len(at), first[1][0])
        if len(sizes) != 1 or len(strides) > 1 or layout is None:
            raise ConfigInvalid(
                f"{pool.layout}: the parts of a page are not evenly spaced; use page_first_direct, page_first or "
                "layer_first",
                field="hicache_mem_layout",
            )
        return cls(at[0], max(last[0]) + first[1][0] - at[0], layout, strides.pop() if strides else 0)

    def offsets(self, pool: Any, indices: Any) -> npt.NDArray[np.int64]:
        """Return the offsets of pages, by the indices of their tokens."""
        pointers = np.asarray(pool.get_page_buffer_meta(indices)[0], dtype=np.int64)
        starts: npt.NDArray[np.int64] = pointers.reshape(-1, self.layout.num_layers).min(axis=1)
        return starts - self.address

    def view(self, offsets: npt.NDArray[np.int64]) -> list[npt.NDArray[np.uint8]]:
        """The memory of each page, as (layers, bytes)."""
        pool = memory_at(self.address, self.length)
        layers, width = self.layout.num_layers, self.layout.slice_bytes
        return [
            np.lib.stride_tricks.as_strided(pool[at:], shape=(layers, width), strides=(self.stride, 1))
            for at in offsets
        ]


class QuireHiCache(HiCacheStorage):  # type: ignore[misc]
    """Storage of one rank. Raises `ConfigInvalid` at start for settings and pools that it does not serve."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise ConfigInvalid("is not set: give 1", field=f"{_FLAG}.interface_v1")
        options = {name: value for name, value in extra.items() if name not in _SGLANGS}
        self._settings = settings = read_settings(HiCacheSettings, options, _FLAG)
        self._config = storage_config
        self._client = Client(settings.gateway, timeout_s=settings.timeout_s, zone=settings.zone, token=settings.token)
        self._client.start()
        self._pool = StagingPool(self._client.allocate(settings.staging_bytes or _STAGING_BYTES))
        self._absence = CircuitBreaker(settings.away_s, "HiCache")

    # ---- what SGLang tells

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._pages = _Pages.of(mem_pool_host)
        self._space = self._namespace(mem_pool_host)
        self._direct: Buffer | None = None
        if self._settings.zero_copy:
            self._direct = self._client.register(memory_at(self._pages.address, self._pages.length))
        logger().info("pages of this engine", namespace=self._space.digest().hex()[:16], rank=self._config.tp_rank)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if host_pool_name != PoolName.KV:
            raise ConfigInvalid(f"{host_pool_name}: only the pool of plain KV is served", field="hicache")
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many from the first on."""
        if self._absence:
            return 0
        try:
            chain, first = self._chain(keys, extra_info)
            if first >= len(chain):
                return 0
            match = self._run(self._client.asynchronous.lookup(self._space, chain, lease_ttl_ms=0))
        except (QuireError, TimeoutError, ValueError) as error:  # hashes that are none, too
            self._absence.failed(error)
            return 0
        self._absence.answered()
        return max(0, len(match.keys) - first)

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Return which of the pages are in the host pool now, from the first on."""
        arrived = 0
        try:
            chain, first = self._chain(keys, extra_info)
            offsets = self._pages.offsets(self.mem_pool_host, host_indices)[: max(0, len(chain) - first)]
            if not len(offsets):
                return [False] * len(keys)
            getting = self._get_direct if self._direct is not None else self._get_staged
            arrived = self._client.spawn(getting(chain, first, offsets)).result()
        except Exception as error:  # an exception ends HiCache's thread
            logger().warning("pages were not loaded", pages=len(keys), error=repr(error))
        return [at < arrived for at in range(len(keys))]

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        stored = 0
        try:
            chain, first = self._chain(keys, extra_info)
            fitting = max(0, len(chain) - first)
            offsets = self._pages.offsets(self.mem_pool_host, host_indices)[:fitting]
            step = max(1, self._settings.staging_bytes // 2 // self._pages.layout.chunk_bytes)
            for at in range(0, fitting, step):
                part = chain.run(0, min(len(chain), first + at + step))
                self._client.spawn(self._set(part, first + at, offsets[at : at + step])).result()
            stored = fitting
        except Exception as error:
            logger().warning("pages were not stored", pages=len(keys), error=repr(error))
        return [at < stored for at in range(len(keys))]

    def exists(self, key: str) -> bool:
        """Return whether a page that begins a prefix is stored."""
        return self.batch_exists([key], HiCacheStorageExtraInfo(prefix_keys=[])) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Not with `interface_v1`."""

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        """Not with `interface_v1`."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Not with `interface_v1`."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Not with `interface_v1`."""
        return False

    def close(self) -> None:
        self._client.close()

    # ---- names

    def _namespace(self, pool: Any) -> Namespace:
        config, settings = self._config, self._settings
        ranks = {
            field.name: getattr(config, field.name)
            for field in fields(config)
            if field.name.endswith(("_rank", "_size")) and field.name not in ("tp_rank", "tp_size", "dp_rank")
        }
        facts = {
            "layout": pool.layout,
            "dtype": str(pool.dtype),
            "page_size": pool.page_size,
            "pool": type(pool).__name__,
            "heads": [getattr(pool, name, 0) for name in ("head_num", "head_dim", "layer_num", "kv_cache_dim")],
            **ranks,
            **configuration_of(str(config.model_name or ""), _server_args()),
        }
        return namespace_of(
            str(config.model_name or ""),
            settings.weights,
            self._pages.layout,
            facts,
            tenant_salt=bytes.fromhex(settings.tenant_salt),
            shard=(0, 1) if config.is_mla_model else (config.tp_rank, config.tp_size),  # of MLA all have the same
            flag=f"{_FLAG}.weights",
        )

    def _chain(self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None) -> tuple[ChunkKeys, int]:
        """The whole prefix, and which of its chunks the first of `keys` is. SGLang's hashes begin a chain with None.

        Of a prompt that is longer than a request to Quire may be, as much as fits.
        """
        parents = extra_info.prefix_keys if extra_info is not None else None
        if parents is None:
            raise ConfigInvalid("is not set: pages cannot be named from the start of their prefix", field=_PREFIXES)
        chain = [*parents, *keys][:KEYS_MAX]
        packed = b"".join(bytes.fromhex(page) for page in chain)
        if len(packed) != KEY_BYTES * len(chain):
            raise ConfigInvalid("SGLang's page hashes are no SHA-256", field="keys")
        return engine_keys(self._space, ChunkKeys(packed)), len(parents)

    # ---- on the client's loop

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._client.spawn(asyncio.wait_for(work, self._settings.lookup_timeout_s)).result()

    async def _get_direct(self, chain: ChunkKeys, first: int, offsets: npt.NDArray[np.int64]) -> int:
        assert self._direct is not None, "zero-copy"
        return await self._deliver(chain, first, self._direct, self._pages.stride, offsets)

    async def _get_staged(self, chain: ChunkKeys, first: int, offsets: npt.NDArray[np.int64]) -> int:
        """A silent node is waited for by the staging memory, not by HiCache."""
        layout, arrived = self._pages.layout, 0
        step = max(1, self._settings.staging_bytes // 2 // layout.chunk_bytes)
        for at in range(0, len(offsets), step):
            part = offsets[at : at + step]
            keys = chain.run(0, first + at + len(part))

            def take(memory: Buffer, count: int, part: npt.NDArray[np.int64] = part) -> None:
                pages = memory.layers(layout.num_layers, len(part), layout.slice_bytes)
                for page, view in enumerate(self._pages.view(part[:count])):
                    view[:] = pages[:, page]

            arrive = partial(self._deliver, keys, first + at)
            count = await staged(self._pool, layout.payload_bytes(len(part)), self._settings.timeout_s, arrive, take)
            arrived += count or 0
            if count != len(part):
                break
        return arrived

    async def _deliver(
        self,
        chain: ChunkKeys,
        first: int,
        memory: Buffer,
        stride: int = 0,
        offsets: npt.NDArray[np.int64] | None = None,
    ) -> int:
        """Return how many arrived, from `first` on, once every node has stopped writing."""
        mask = await retrieve_into(
            self._client.asynchronous,
            self._space,
            chain,
            memory,
            first_chunk=first,
            places=SlicePlaces(stride, offsets),
        )
        return len(mask) if all(mask) else mask.index(0)

    async def _set(self, chain: ChunkKeys, first: int, offsets: npt.NDArray[np.int64]) -> None:
        layout = self._pages.layout
        memory = await self._pool.take_soon(layout.payload_bytes(len(offsets)), self._settings.timeout_s)
        try:
            pages = memory.layers(layout.num_layers, len(offsets), layout.slice_bytes)
            for page, view in enumerate(self._pages.view(offsets)):
                pages[:, page] = view
            level = Durability[self._settings.durability.upper()]
            session = await self._client.asynchronous.store(
                self._space, chain, first, memory, durability=level, complete=True
            )
            await session.commit()
        finally:
            self._pool.give_back_when_idle(memory)


def _server_args() -> Any:
    """Return the arguments of the server that this runs in; None in a process without one."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, RuntimeError, ValueError, AttributeError) as error:
        logger().info("the server's arguments are not known: pages are not named by its overrides", error=repr(error))
        return None


def _tokens(page: int, size: int) -> Any:
    import torch

    return torch.arange(page * size, (page + 1) * size)
