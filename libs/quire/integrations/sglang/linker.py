"""SGLang's external linker on Quire: pages of its device pool, loaded layer by layer, without a host pool.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "QuireLinker", "linker_module_path": "quire.integrations.sglang",
        "linker_extra_config": {"gateway": "HOST:PORT"}}'

A page is a chunk that stands for itself: SGLang requests the tail of a prefix without naming the part before it. Pages
arrive in staging memory, and from there, layer by layer, to the pool: no node writes to SGLang's own memory. A load
starts when SGLang queues it: pages that are missing then are computed. SGLang ends a request whose load fails later. On
a CPU loads have the compute window of a layer as the last loads measured it; on a GPU, which computes behind the
launches of its kernels, they have none.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

from quire.client import Buffer, Client, Delivery
from quire.integrations.circuit_breaker import CircuitBreaker
from quire.integrations.objects import plain_layout
from quire.integrations.settings import check_common, read_settings
from quire.integrations.sglang.naming import configuration_of, namespace_of
from quire.integrations.staging import StagingPool
from quire.model.durability import Durability
from quire.model.errors import ConfigInvalid, PeerLost, QuireError
from quire.model.hashing import Namespace, engine_keys
from quire.model.keys import ChunkKeys
from quire.model.urgency import Urgency
from quire.telemetry import logger
from quire.transport.devices import PASSED, Event, copy_stream

_FLAG: Final = "linker_extra_config"
_STAGING_BYTES: Final = 256 << 20
_MEASURED: Final = 9
_LOOK_S: Final = 0.0005

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkerSettings:
    """Settings as of `HiCacheSettings`; `staging_bytes`: registered memory for loads and stores."""

    gateway: str = ""
    durability: str = "memory"
    weights: str = ""
    lookup_timeout_s: float = 1.0
    timeout_s: float = 20.0
    away_s: float = 2.0
    staging_bytes: int = _STAGING_BYTES
    tenant_salt: str = ""
    token: str = ""
    zone: str = ""

    def __post_init__(self) -> None:
        check_common(self, _FLAG)


@dataclass(slots=True)
class _Load:
    """Pages of a request on their way to `memory`; `slots`: tokens of the device pool."""

    memory: Buffer
    delivery: Delivery
    slots: torch.Tensor
    pages: int


class _Counter(LayerWiseLoadCounter):  # type: ignore[misc]
    """SGLang's counter of layers, which also measures when SGLang waits, and for how long it computes a layer."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self._windows_us: deque[float] = deque(maxlen=_MEASURED)
        self._wanted_ns: dict[int, list[int]] = {}
        self._returned_ns, self._computed_ns = 0, 0

    @property
    def window_us(self) -> int:
        """Return the time for which SGLang computes a layer, microseconds; 0 before the first load."""
        return round(statistics.median(self._windows_us)) if self._windows_us else 0

    def wait_until(self, threshold: int) -> None:
        if self.consumer_index not in self.futures:
            return
        waits_ns = self._wanted_ns.setdefault(self.consumer_index, [])
        if threshold == len(waits_ns):  # a layer's K; its V is waited for, too
            now_ns = time.monotonic_ns()
            self._computed_ns = self._computed_ns + now_ns - self._returned_ns if waits_ns else 0
            waits_ns.append(now_ns)
            if len(waits_ns) == self.num_layers > 1:
                self._windows_us.append(self._computed_ns / 1e3 / (self.num_layers - 1))
        super().wait_until(threshold)
        self._returned_ns = time.monotonic_ns()

    def take_wanted(self, index: int) -> list[int]:
        """Take the times at which SGLang began to wait for the layers of a batch, nanoseconds."""
        return self._wanted_ns.pop(index, [])

    def reset(self) -> None:
        super().reset()
        self._wanted_ns.clear()


class QuireLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Linker of one rank. Raises `ConfigInvalid` at start for settings and pools that it does not serve."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        self._settings = settings = read_settings(LinkerSettings, extra_config or {}, _FLAG)
        self._kv, self._page = params.token_to_kv_pool_allocator.get_kvcache(), params.page_size
        if not (hasattr(self._kv, "k_buffer") and hasattr(self._kv, "v_buffer")):
            raise ConfigInvalid(f"{type(self._kv).__name__}: only pools of K and V are served", field="linker")
        self.forward_stream, self.pools = forward_stream, {PoolName.KV: self._kv}
        self._space = self._namespace(server_args, params)
        self.layer_done_counter = _Counter(self._space.layout.num_layers)
        self._batches: dict[int, list[_Load]] = {}
        self._client = Client(settings.gateway, timeout_s=settings.timeout_s, zone=settings.zone, token=settings.token)
        self._client.start()
        staging = self._client.allocate(settings.staging_bytes or _STAGING_BYTES)
        self._pool, self._copies = StagingPool(staging), copy_stream(self._kv.k_buffer[0].device)
        assert staging.view is not None, "it is host memory"
        self._copies.pin(staging.view)
        self._absence = CircuitBreaker(settings.away_s, "SGLang")
        self._queued: dict[str, _Load] = {}
        self._offloads: deque[Any] = deque()
        self._lock = threading.Lock()

    # ---- what SGLang asks

    def record_offload_ready(self) -> list[Any]:
        events: list[Any] = super().record_offload_ready() if self._kv.k_buffer[0].is_cuda else []
        return events

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Every number of pages from the first on that is there."""
        if self._absence:
            return []
        try:
            keys = self._keys(_kv_of(transfers))
            match = self._run(self._client.asynchronous.lookup(self._space, keys, lease_ttl_ms=0, unchained=True))
        except (QuireError, TimeoutError, ValueError) as error:  # hashes that are none, too
            self._absence.failed(error)
            return []
        self._absence.answered()
        limit = self._settings.staging_bytes // 2 // self._space.layout.chunk_bytes
        return [at + 1 for at, position in enumerate(match.there[:limit]) if at == position]

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Return whether the load was begun; else its pages are computed.

        Ranks have to decide alike, so one of several ranks always returns True.
        """
        transfer, load = _kv_of(transfers), None
        try:
            load = self._run(self._begin(self._keys(transfer), _slots_of(transfer)))
        except (QuireError, TimeoutError, ValueError) as error:
            logger().warning("a load was not begun", request=rid, error=repr(error))
        if load is not None:
            self._queued[rid] = load
        elif self._space.shard_count > 1:
            self._queued[rid] = _lost()
        return rid in self._queued

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        loads, self._queued = list(self._queued.values()), {}
        index = int(self.layer_done_counter.update_producer())
        self._batches[index] = loads
        self._client.spawn(self._follow(index, loads, self._copies.record()))
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        landed = bool(self.layer_done_counter.finish(counter_index))
        loads, wanted_ns = self._batches.pop(counter_index, []), self.layer_done_counter.take_wanted(counter_index)
        if landed and len(wanted_ns) == self._space.layout.num_layers:
            for load in loads:
                self._client.post(partial(load.delivery.wanted, wanted_ns))
        return landed

    def cancel_queued_load(self, rid: str) -> bool:
        load = self._queued.pop(rid, None)
        if load is not None:
            self._client.post(lambda: self._drop(load))
        return load is not None

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        transfer = _kv_of(transfers)
        try:
            keys = self._keys(transfer)
        except (QuireError, ValueError) as error:
            logger().warning("pages cannot be stored", pages=len(transfer.keys), error=repr(error))
            return False
        memory = self._pool.take(self._space.layout.payload_bytes(len(keys)))
        if memory is None:
            return False
        ended = self._client.spawn(self._offload(keys, _slots_of(transfer), memory, self.record_offload_ready()))
        with self._lock:
            self._offloads.append(ended)
        return True

    def num_completed_offloads(self) -> int:
        """Count finished ones from the oldest on: SGLang takes them in order."""
        with self._lock:
            return next((at for at, offload in enumerate(self._offloads) if not offload.done()), len(self._offloads))

    def pop_completed_offload(self) -> bool:
        with self._lock:
            return bool(self._offloads.popleft().result())

    def reset(self) -> None:
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        with self._lock:
            pending, self._offloads = list(self._offloads), deque()
        for offload in pending:
            offload.result()
        self._batches.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        self._client.close()

    # ---- names

    def _namespace(self, server_args: Any, params: Any) -> Namespace:
        key, value = self._kv.k_buffer[0], self._kv.v_buffer[0]
        row_bytes = key[0].nbytes
        layout = plain_layout(len(self._kv.k_buffer), 2 * self._page * row_bytes)
        if layout is None or value[0].nbytes != row_bytes or not key.is_contiguous() or not value.is_contiguous():
            raise ConfigInvalid("K and V of a token have different sizes, or are not dense", field="linker")
        group = params.tp_cache_group
        alone = group is None or not torch.distributed.is_initialized()
        shard = (0, 1) if alone else (torch.distributed.get_rank(group), torch.distributed.get_world_size(group))
        facts = {
            "pool": type(self._kv).__name__,
            "dtype": str(key.dtype),
            "page_size": self._page,
            "token": list(key.shape[1:]),
            "pipeline": [params.pp_rank, params.pp_size],
            "context": [params.attn_cp_rank, params.attn_cp_size],
            "speculative": params.is_eagle,
            "quantization": str(server_args.quantization),
            **configuration_of(server_args.model_path, server_args),
        }
        settings = self._settings
        salt = bytes.fromhex(settings.tenant_salt)
        return namespace_of(
            server_args.model_path,
            settings.weights,
            layout,
            facts,
            tenant_salt=salt,
            shard=shard,
            flag=f"{_FLAG}.weights",
        )

    def _keys(self, transfer: Any) -> ChunkKeys:
        return engine_keys(self._space, ChunkKeys(b"".join(bytes.fromhex(key) for key in transfer.keys)))

    @property
    def _urgency(self) -> Urgency:
        measured = self._kv.k_buffer[0].device.type == "cpu"
        return Urgency(compute_window_us=self.layer_done_counter.window_us if measured else 0)

    # ---- on the client's loop

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._client.spawn(asyncio.wait_for(work, self._settings.lookup_timeout_s)).result()

    async def _begin(self, keys: ChunkKeys, slots: torch.Tensor) -> _Load | None:
        """Ask for all of them; None where some are not there, or there is no room for them."""
        memory = self._pool.take(self._space.layout.payload_bytes(len(keys)))
        if memory is None:
            return None
        delivery = None
        try:
            retrieval = await self._client.asynchronous.retrieve(
                self._space, keys, memory, lease_ttl_ms=0, urgency=self._urgency, unchained=True
            )
            delivery = retrieval.delivery
            if delivery is not None and len(retrieval.found.there) == len(keys):
                return _Load(memory, delivery, slots, len(keys))
            if delivery is not None:
                delivery.abandon()
        except BaseException:
            self._pool.give_back_when_idle(memory)
            raise
        self._pool.give_back_when_idle(memory)
        return None

    async def _follow(self, index: int, loads: Sequence[_Load], dependency: Event) -> None:
        """Copy each layer to the pool as soon as it has arrived for all requests of the batch.

        A layer is complete when its copy is: SGLang's forward pass does not wait for any stream of ours. `dependency`:
        behind work of SGLang that may still read these pages.
        """
        counter = self.layer_done_counter
        copied: Event = PASSED
        try:
            if any(load.pages == 0 for load in loads):
                raise PeerLost("a load was not begun")
            async with asyncio.timeout(self._settings.timeout_s):
                for layer in range(self._space.layout.num_layers):
                    for load in loads:
                        await load.delivery.arrival(layer)
                        copied = self._copies.submit(partial(self._put, load, layer), dependency)
                    while not copied.query():
                        await asyncio.sleep(_LOOK_S)
                    counter.complete(index, layer)
        except Exception as error:
            logger().error("a load failed; SGLang ends its requests", requests=len(loads), error=repr(error))
            counter.fail(index, error)
            copied.synchronize()  # until then it reads staging memory
            for load in loads:
                self._drop(load)
            return
        for load in loads:
            self._pool.give_back_when_idle(load.memory)

    def _drop(self, load: _Load) -> None:
        """Give the load up: its memory comes back when no node can write there."""
        if load.pages:
            load.delivery.abandon()
            self._pool.give_back_when_idle(load.memory)

    def _put(self, load: _Load, layer: int) -> None:
        """Copy from staging memory to the pool: K of a page, then its V."""
        for half, buffer in enumerate((self._kv.k_buffer[layer], self._kv.v_buffer[layer])):
            staged = self._staged(load.memory, load.pages, layer, buffer)
            rows = staged[:, half].reshape(-1, *buffer.shape[1:]).to(buffer.device, non_blocking=True)
            buffer[load.slots.to(buffer.device, non_blocking=True)] = rows

    def _staged(self, memory: Buffer, pages: int, layer: int, like: torch.Tensor) -> torch.Tensor:
        """(pages, K and V, tokens, …) of a layer, as the pool's type."""
        layout = self._space.layout
        plain = torch.from_numpy(memory.layers(layout.num_layers, pages, layout.slice_bytes)[layer])
        return plain.view(like.dtype).view(pages, 2, self._page, *like.shape[1:])

    async def _offload(self, keys: ChunkKeys, slots: torch.Tensor, memory: Buffer, ready: Sequence[Any]) -> bool:
        """Whether it is stored. The copy is not on the loop: it waits for the forward pass that writes the pages."""
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._take, slots, memory, len(keys), ready)
            level = Durability[self._settings.durability.upper()]
            session = await self._client.asynchronous.store(
                self._space, keys, 0, memory, durability=level, complete=True, unchained=True
            )
            await session.commit()
            return True
        except QuireError as error:
            logger().warning("pages were not stored", pages=len(keys), error=repr(error))
            return False
        finally:
            self._pool.give_back_when_idle(memory)

    def _take(self, slots: torch.Tensor, memory: Buffer, pages: int, ready: Sequence[Any]) -> None:
        """Return when the pages are in staging memory."""
        for event in ready:
            event.synchronize()
        self._copies.submit(partial(self._copy_out, slots, memory, pages)).synchronize()

    def _copy_out(self, slots: torch.Tensor, memory: Buffer, pages: int) -> None:
        for layer in range(self._space.layout.num_layers):
            for half, buffer in enumerate((self._kv.k_buffer[layer], self._kv.v_buffer[layer])):
                staged = self._staged(memory, pages, layer, buffer)
                rows = buffer[slots.to(buffer.device)].cpu()
                staged[:, half] = rows.view(pages, self._page, *buffer.shape[1:])


def _kv_of(transfers: Sequence[Any]) -> Any:
    return next(transfer for transfer in transfers if transfer.name == PoolName.KV)


def _slots_of(transfer: Any) -> torch.Tensor:
    slots: torch.Tensor = transfer.device_indices if transfer.device_indices is not None else transfer.host_indices
    return slots.clone()


def _lost() -> _Load:
    """Stands for one that was not begun, where the other ranks go on with theirs."""
    no_data: Any = None
    return _Load(no_data, no_data, no_data, 0)
