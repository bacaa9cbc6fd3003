"""LMCache's second level on Quire: a plug-in for the LMCache server.

    lmcache server --l2-adapter '{"type": "plugin", "module_path": "quire.integrations.lmcache",
        "class_name": "QuireL2Adapter", "adapter_params": {"gateway": "HOST:PORT"}}' ...

Storage nodes read from and write to LMCache's own memory, which is registered once. Whatever fails costs its own
objects: they are misses, or not stored. What is loaded counts as there only once no node writes to its memory any more.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate
from typing import Any, Final, Generic, TypeVar

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj

from quire.client import Buffer, SyncClient
from quire.integrations.absence import Absence
from quire.integrations.objects import Objects, Owner, Place, address_of, memory_at
from quire.integrations.settings import check_common, read_settings
from quire.integrations.staging import StagingPool, staged
from quire.model.durability import Durability
from quire.model.errors import QuireError
from quire.telemetry import logger

_FLAG: Final = "adapter_params"
_SIZES_MAX: Final = 4
_STAGING_BYTES: Final = 64 << 20
_DIRECT_BYTES_MIN: Final = 4 << 20

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class LmcacheSettings:
    """Raises `ConfigInvalid`, naming the setting, for values that make no sense.

    `gateway`: host:port. `durability`: of what is stored. `lookup_timeout_s`: for how long a look-up may take, else
    it is a miss; `away_s`: for how long Quire is left alone then. `weights`: names what the model's name does not, for
    one that changes under its name. `zero_copy`: loads go straight into LMCache's memory; then one from a storage node
    that falls silent ends only when the node can write there no more. Without it loads are staged, and end after
    `timeout_s` in any case. `staging_bytes`: registered memory for these, and for objects outside of LMCache's arena.
    `tenant_salt`: hexadecimal.
    """

    gateway: str = ""
    durability: str = "memory"
    weights: str = ""
    lookup_timeout_s: float = 1.0
    timeout_s: float = 20.0
    away_s: float = 2.0
    zero_copy: bool = True
    staging_bytes: int = _STAGING_BYTES
    tenant_salt: str = ""
    token: str = ""
    zone: str = ""

    def __post_init__(self) -> None:
        check_common(self, _FLAG)


class _Ends(Generic[Result]):
    """Tasks of one kind that have ended, and the descriptor that says so."""

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


@dataclass(frozen=True, slots=True)
class _Part:
    """The `at`-th object of a task: where it is in Quire and in memory. `offset`: in LMCache's arena, if there."""

    at: int
    place: Place
    address: int
    size: int
    offset: int | None


class QuireL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """One LMCache server's. Raises `ConfigInvalid` for settings that make no sense."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: L1MemoryDesc | None = None) -> None:
        super().__init__(0)
        self._settings = settings = read_settings(LmcacheSettings, params, _FLAG)
        self._client = SyncClient(
            settings.gateway, timeout_s=settings.timeout_s, zone=settings.zone, token=settings.token
        )
        self._client.start()
        self._arena: Buffer | None = None
        if l1_memory_desc is not None:
            length = l1_memory_desc.stable_registration_size or l1_memory_desc.size
            self._arena = self._client.register(memory_at(l1_memory_desc.ptr, length))
        self._pool = StagingPool(self._client.allocate(settings.staging_bytes or _STAGING_BYTES))
        self._objects = Objects(self._client.asynchronous, Durability[settings.durability.upper()])
        self._version = f"lmcache {'.'.join(version('lmcache').split('.')[:2])}/{settings.weights}"
        self._absence = Absence(settings.away_s)
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
        """Nothing is locked: a node holds what it delivers, and what is evicted before that is a miss then."""

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
            "registered": self._arena is not None,
        }

    def close(self) -> None:
        self._client.close()
        for each in (self._stored, self._found, self._loaded):
            each.close()

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
        found = Bitmap(len(keys))
        if self._absence:
            return found
        try:
            there = await asyncio.wait_for(self._have(keys, descs), self._settings.lookup_timeout_s)
        except (QuireError, TimeoutError) as error:
            away_s = self._absence.failed()
            logger().warning("Quire does not answer; LMCache goes on without it", error=repr(error), for_s=away_s)
            return found
        self._absence.answered()
        for at in there:
            found.set(at)
        self._notify_keys_accessed([keys[at] for at in there])
        return found

    async def _have(self, keys: Sequence[ObjectKey], descs: dict[int, MemoryLayoutDesc]) -> list[int]:
        """Which of them are there, in the one size or another."""
        asked = [(at, size) for at, key in enumerate(keys) for size in self._sizes_of(key, descs)]
        have = await self._objects.have([self._place(keys[at], size) for at, size in asked])
        return sorted({at for (at, _), there in zip(asked, have, strict=True) if there})

    async def _load(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> Bitmap:
        loaded, parts = Bitmap(len(keys)), self._parts(keys, objects)
        own = [each for each in parts if each.offset is not None and self._settings.zero_copy]
        ends = await asyncio.gather(
            *([self._load_own(own)] if own else []),
            *(self._load_staged(each) for each in self._batches([each for each in parts if each not in own])),
            return_exceptions=True,
        )
        for end in ends:
            if isinstance(end, BaseException):
                logger().warning("objects were not loaded", error=repr(end))
            else:
                for at in end:
                    loaded.set(at)
        return loaded

    async def _load_own(self, parts: Sequence[_Part]) -> list[int]:
        """Straight into LMCache's memory; which arrived."""
        assert self._arena is not None, "they lie in it"
        offsets = [each.offset or 0 for each in parts]
        arrived = await self._objects.get([each.place for each in parts], self._arena, offsets)
        return [each.at for each, there in zip(parts, arrived, strict=True) if there]

    async def _load_staged(self, parts: Sequence[_Part]) -> list[int]:
        """A silent node is waited for by the staging memory, not by LMCache."""
        offsets = [0, *accumulate(each.size for each in parts)]

        def take(memory: Buffer, arrived: list[bool]) -> None:
            for each, start, there in zip(parts, offsets, arrived, strict=False):
                if there:
                    memory_at(each.address, each.size)[:] = _bytes_of(memory, start, each.size)

        async def arrive(memory: Buffer) -> list[bool]:
            return await self._objects.get([each.place for each in parts], memory, offsets[:-1])

        arrived = await staged(self._pool, offsets[-1], self._settings.timeout_s, arrive, take)
        return [each.at for each, there in zip(parts, arrived or (), strict=False) if there]

    async def _store(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> L2StoreResult:
        parts = self._parts(keys, objects)
        runs, rest = _runs(parts)
        works = [self._store_own(each) for each in runs] + [self._store_staged(each) for each in self._batches(rest)]
        ends = await asyncio.gather(*works, return_exceptions=True)
        errors = [end for end in ends if isinstance(end, BaseException)]
        stored = [each for end in ends if not isinstance(end, BaseException) for each in end]
        if errors:
            logger().warning("objects were not stored", objects=len(parts) - len(stored), error=repr(errors[0]))
        self._notify_keys_stored([keys[each.at] for each in stored], [each.size for each in stored])
        return L2StoreResult(not errors, sum(each.size for each in stored))

    async def _store_own(self, parts: Sequence[_Part]) -> Sequence[_Part]:
        """Out of LMCache's memory, where they follow each other."""
        assert self._arena is not None, "they lie in it"
        source = self._arena.part(parts[0].offset or 0, sum(each.size for each in parts))
        await self._objects.put([each.place for each in parts], source)
        return parts

    async def _store_staged(self, parts: Sequence[_Part]) -> Sequence[_Part]:
        memory = await self._pool.take_soon(sum(each.size for each in parts), self._settings.timeout_s)
        try:
            for at, each in enumerate(parts):
                _bytes_of(memory, at * each.size, each.size)[:] = memory_at(each.address, each.size)
            await self._objects.put([each.place for each in parts], memory.part(0, len(parts) * parts[0].size))
        finally:
            self._pool.give_back(memory)
        return parts

    async def _delete(self, keys: Sequence[ObjectKey]) -> None:
        gone: list[tuple[ObjectKey, int]] = []
        for key in keys:
            for size in self._sizes_of(key, {}):
                try:
                    if await self._objects.drop(self._place(key, size)):
                        gone.append((key, size))
                except QuireError as error:
                    logger().warning("an object was not dropped", key=key.chunk_hash.hex(), error=str(error))
        self._notify_keys_deleted([key for key, _ in gone], [size for _, size in gone])

    # ---- names and memory

    def _place(self, key: ObjectKey, size: int) -> Place:
        owner = Owner(
            model=key.model_name, version=self._version, tenant_salt=bytes.fromhex(self._settings.tenant_salt)
        )
        name = f"{key.kv_rank}/{key.object_group_id}/{key.cache_salt}/".encode() + key.chunk_hash
        return owner.place(hashlib.sha256(name).digest(), size)

    def _learn(self, key: ObjectKey, size: int) -> None:
        """On the client's loop, as everything that uses it."""
        sizes = self._sizes.setdefault((key.model_name, key.object_group_id), {})
        sizes.pop(size, None)
        sizes[size] = None
        if len(sizes) > _SIZES_MAX:
            del sizes[next(iter(sizes))]

    def _sizes_of(self, key: ObjectKey, descs: dict[int, MemoryLayoutDesc]) -> list[int]:
        """How large it may be: as objects of its group were, the last one first, or as LMCache lays it out."""
        sizes = list(reversed(self._sizes.get((key.model_name, key.object_group_id), {})))
        desc = descs.get(key.object_group_id)
        told = sum(
            shape.numel() * dtype.itemsize for shape, dtype in zip(desc.shapes, desc.dtypes, strict=True)
        ) if desc is not None else 0  # fmt: skip
        return sizes if not told or told in sizes else [*sizes, told]

    def _parts(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> list[_Part]:
        parts = []
        for at, (key, memory) in enumerate(zip(keys, objects, strict=True)):
            address, size = address_of(memory.byte_array)
            self._learn(key, size)
            start = address - self._arena.target().address if self._arena is not None else -1
            inside = self._arena is not None and 0 <= start <= self._arena.length - size
            parts.append(_Part(at, self._place(key, size), address, size, start if inside else None))
        return parts

    def _batches(self, parts: Sequence[_Part]) -> list[list[_Part]]:
        """Of one size each, and of a part of the staging memory at most."""
        batches: list[list[_Part]] = []
        most = (self._settings.staging_bytes or _STAGING_BYTES) // 4
        for each in sorted(parts, key=lambda part: part.size):
            if not batches or batches[-1][0].size != each.size or (len(batches[-1]) + 1) * each.size > most:
                batches.append([])
            batches[-1].append(each)
        return batches


def _runs(parts: Sequence[_Part]) -> tuple[list[list[_Part]], list[_Part]]:
    """Those of one size that follow each other in LMCache's arena, where that is worth a request; and the others."""
    runs: list[list[_Part]] = []
    for each in sorted((each for each in parts if each.offset is not None), key=lambda part: part.address):
        last = runs[-1][-1] if runs else None
        if last is None or last.size != each.size or last.address + last.size != each.address:
            runs.append([])
        runs[-1].append(each)
    long = [run for run in runs if len(run) == len(parts) or len(run) * run[0].size >= _DIRECT_BYTES_MIN]
    taken = {each.at for run in long for each in run}
    return long, [each for each in parts if each.at not in taken]


def _bytes_of(memory: Buffer, start: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    assert memory.view is not None, "host memory"
    return memory.view[start : start + size]
