"""LMCache's second level on Quire: a plug-in for the LMCache server.

    lmcache server --l2-adapter '{"type": "plugin", "module_path": "quire.integrations.lmcache",
        "class_name": "QuireL2Adapter", "adapter_params": {"gateway": "HOST:PORT"}}' ...

Objects pass through staging memory; with `zero_copy` storage nodes read from and write to LMCache's own memory, which
is registered once. Whatever fails costs its own objects: they are misses, or not stored. A loaded object counts as
present only once every node has stopped writing to its memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final, Generic, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj

from quire.integrations.circuit_breaker import CircuitBreaker
from quire.integrations.objects import Owner, Place, address_of, memory_at
from quire.integrations.settings import read_settings
from quire.integrations.transfers import ObjectPart, ObjectSettings, ObjectTransfers
from quire.model.errors import QuireError
from quire.telemetry import logger

_FLAG: Final = "adapter_params"
_SIZES_MAX: Final = 4

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class LmcacheSettings(ObjectSettings):
    """Settings of `QuireL2Adapter`; an invalid value raises `ConfigInvalid`, naming the setting."""

    def __post_init__(self) -> None:
        self.check(_FLAG)


class _Ends(Generic[Result]):
    """Finished tasks of one kind, and the descriptor that signals them."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._ended: dict[int, Result] = {}
        self._open = True

    def add(self, task: int, result: Result) -> None:
        with self._lock:
            if self._open:
                self._ended[task] = result
                os.eventfd_write(self.fd, 1)

    def take(self, task: int) -> Result | None:
        with self._lock:
            return self._ended.pop(task, None)

    def take_all(self) -> dict[int, Result]:
        with self._lock:
            ended, self._ended = self._ended, {}
            return ended

    def close(self) -> None:
        with self._lock:
            self._open = False
            os.close(self.fd)


class QuireL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Adapter of one LMCache server. Raises `ConfigInvalid` for invalid settings."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: L1MemoryDesc | None = None) -> None:
        super().__init__(0)
        self._settings = settings = read_settings(LmcacheSettings, params, _FLAG)
        arena = None
        if l1_memory_desc is not None and settings.zero_copy:
            length = l1_memory_desc.stable_registration_size or l1_memory_desc.size
            arena = memory_at(l1_memory_desc.ptr, length)
        self._transfers = ObjectTransfers(settings, arena)
        self._client, self._objects = self._transfers.client, self._transfers.objects
        self._version = f"lmcache {'.'.join(version('lmcache').split('.')[:2])}/{settings.weights}"
        self._absence = CircuitBreaker(settings.away_s, "LMCache")
        self._lock = threading.Lock()
        self._tasks = 0
        self._sizes: dict[tuple[str, int], dict[int, None]] = {}
        self._stored: _Ends[L2StoreResult] = _Ends()
        self._found: _Ends[Bitmap] = _Ends()
        self._loaded: _Ends[Bitmap] = _Ends()

    # ---- what LMCache asks

    def get_store_event_fd(self) -> int:
        return self._stored.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._found.fd

    def get_load_event_fd(self) -> int:
        return self._loaded.fd

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._submit(self._store(keys, objects), self._stored, L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stored.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        return self._submit(self._look_up(keys, group_layout_descs), self._found, Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._found.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Lock nothing: a node holds the chunks that it delivers; one that is evicted earlier is a miss."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._submit(self._load(keys, objects), self._loaded, Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loaded.take(task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        self._client.spawn(self._delete(keys))

    def report_status(self) -> dict[str, Any]:
        return {
            "is_healthy": not self._absence,
            "gateway": self._settings.gateway,
            "registered": self._transfers.registered,
        }

    def close(self) -> None:
        self._transfers.close()
        for notifier in (self._stored, self._found, self._loaded):
            notifier.close()

    # ---- on the client's loop

    def _submit(self, work: Coroutine[Any, Any, Result], ends: _Ends[Result], failed: Result) -> int:
        with self._lock:
            self._tasks += 1
            task = self._tasks

        async def run() -> None:
            result = failed
            try:
                result = await work
            except Exception as error:  # LMCache's threads wait for every task's end
                logger().error("a task of LMCache broke off", exc_info=error)
            finally:
                ends.add(task, result)

        self._client.spawn(run())
        return task

    async def _look_up(self, keys: Sequence[ObjectKey], descs: dict[int, MemoryLayoutDesc]) -> Bitmap:
        bitmap = Bitmap(len(keys))
        if self._absence:
            return bitmap
        try:
            present = await asyncio.wait_for(self._have(keys, descs), self._settings.lookup_timeout_s)
        except (QuireError, TimeoutError) as error:
            self._absence.failed(error)
            return bitmap
        self._absence.answered()
        for at in present:
            bitmap.set(at)
        self._notify_keys_accessed([keys[at] for at in present])
        return bitmap

    async def _have(self, keys: Sequence[ObjectKey], descs: dict[int, MemoryLayoutDesc]) -> list[int]:
        """Return which of them are stored, in one size or another."""
        sized = [(at, size) for at, key in enumerate(keys) for size in self._sizes_of(key, descs)]
        have = await self._objects.have([self._place(keys[at], size) for at, size in sized])
        return sorted({at for (at, _), is_present in zip(sized, have, strict=True) if is_present})

    async def _load(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> Bitmap:
        loaded = Bitmap(len(keys))
        for at in await self._transfers.load(self._parts(keys, objects)):
            loaded.set(at)
        return loaded

    async def _store(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> L2StoreResult:
        parts = self._parts(keys, objects)
        stored = await self._transfers.store(parts)
        self._notify_keys_stored([keys[part.at] for part in stored], [part.size for part in stored])
        return L2StoreResult(len(stored) == len(parts), sum(part.size for part in stored))

    async def _delete(self, keys: Sequence[ObjectKey]) -> None:
        deleted: list[tuple[ObjectKey, int]] = []
        for key in keys:
            for size in self._sizes_of(key, {}):
                try:
                    if await self._objects.drop(self._place(key, size)):
                        deleted.append((key, size))
                except QuireError as error:
                    logger().warning("an object was not dropped", key=key.chunk_hash.hex(), error=str(error))
        self._notify_keys_deleted([key for key, _ in deleted], [size for _, size in deleted])

    # ---- names and memory

    def _place(self, key: ObjectKey, size: int) -> Place:
        owner = Owner(
            model=key.model_name, version=self._version, tenant_salt=bytes.fromhex(self._settings.tenant_salt)
        )
        name = f"{key.kv_rank}/{key.object_group_id}/{key.cache_salt}/".encode() + key.chunk_hash
        return owner.place(hashlib.sha256(name).digest(), size)

    def _learn(self, key: ObjectKey, size: int) -> None:
        """Run on the client's loop, as everything that uses it."""
        sizes = self._sizes.setdefault((key.model_name, key.object_group_id), {})
        sizes.pop(size, None)
        sizes[size] = None
        if len(sizes) > _SIZES_MAX:
            del sizes[next(iter(sizes))]

    def _sizes_of(self, key: ObjectKey, descs: dict[int, MemoryLayoutDesc]) -> list[int]:
        """How large it may be: as objects of its group were, the last one first, or as LMCache lays it out."""
        sizes = list(reversed(self._sizes.get((key.model_name, key.object_group_id), {})))
        desc = descs.get(key.object_group_id)
        laid_out_bytes = sum(
            shape.numel() * dtype.itemsize for shape, dtype in zip(desc.shapes, desc.dtypes, strict=True)
        ) if desc is not None else 0  # fmt: skip
        return sizes if not laid_out_bytes or laid_out_bytes in sizes else [*sizes, laid_out_bytes]

    def _parts(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> list[ObjectPart]:
        parts = []
        for at, (key, memory) in enumerate(zip(keys, objects, strict=True)):
            address, size = address_of(memory.byte_array)
            self._learn(key, size)
            parts.append(ObjectPart(at, self._place(key, size), address, size))
        return parts
