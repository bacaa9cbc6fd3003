"""Objects between Quire and memory that belongs to an engine: straight, where that memory is registered, or staged.

For engines that have chunks of bytes under names of their own: LMCache, vLLM's tiers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from quire.client import Buffer, Client
from quire.integrations.objects import Objects, Place, memory_at
from quire.integrations.settings import check_common
from quire.integrations.staging import StagingPool, staged
from quire.model.durability import Durability
from quire.model.errors import DeadlineExceeded
from quire.telemetry import logger

_STAGING_BYTES: Final = 64 << 20
_AT_ONCE: Final = 4
_DIRECT_BYTES_MIN: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSettings:
    """User settings for an engine that stores objects. Raises `ConfigInvalid` for invalid values.

    `gateway`: host:port. `durability`: of stored objects. `lookup_timeout_s`: for how long a look-up may take, else it
    is a miss; `away_s`: for how long Quire is left alone then. `weights`: name of the weights, for a model that changes
    under its name. `zero_copy`: straight into and out of the engine's memory; then a transfer with a storage node that
    falls silent ends only when the node can no longer touch it. Without it transfers are staged, and end after
    `timeout_s` in any case. `staging_bytes`: registered memory for these, and for ranges outside of the engine's
    registered memory; 0 for 64 MiB, and more once objects need it. `tenant_salt`: hexadecimal.
    """

    gateway: str = ""
    durability: str = "memory"
    weights: str = ""
    lookup_timeout_s: float = 1.0
    timeout_s: float = 20.0
    away_s: float = 2.0
    zero_copy: bool = False
    staging_bytes: int = 0
    tenant_salt: str = ""
    token: str = ""
    zone: str = ""

    def check(self, flag: str) -> None:
        """`flag`: the engine's, for error messages."""
        check_common(self, flag)


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """The `at`-th object of a task: where it is in Quire, and in this process's memory."""

    at: int
    place: Place
    address: int
    size: int


class ObjectTransfers:
    """Over one client. `arena`: the engine's memory, to be registered once; None for one that must not be."""

    def __init__(self, settings: ObjectSettings, arena: npt.NDArray[np.uint8] | None) -> None:
        self._settings = settings
        self.client = Client(settings.gateway, timeout_s=settings.timeout_s, zone=settings.zone, token=settings.token)
        self.client.start()
        self._arena = self.client.register(arena) if arena is not None else None
        self._staging_bytes = settings.staging_bytes or _STAGING_BYTES
        self._pool = StagingPool(self.client.allocate(self._staging_bytes))
        self.objects = Objects(self.client.asynchronous, Durability[settings.durability.upper()])

    @property
    def registered(self) -> bool:
        """Whether the engine's memory is read and written by storage nodes themselves."""
        return self._arena is not None

    def close(self) -> None:
        """Stop every transfer; nothing touches the engine's memory afterwards."""
        self.client.close()

    async def load(self, parts: Sequence[ObjectPart]) -> list[int]:
        """Return which parts arrived. A failure is a miss; no node writes to the engine's memory afterwards."""
        own = [part for part in parts if self._offset(part) is not None and self._settings.zero_copy]
        taken = {part.at for part in own}
        ends = await asyncio.gather(
            *([self._load_own(own)] if own else []),
            *(self._load_staged(batch) for batch in self._batches([part for part in parts if part.at not in taken])),
            return_exceptions=True,
        )
        loaded: list[int] = []
        for end in ends:
            if isinstance(end, BaseException):
                logger().warning("objects were not loaded", error=repr(end))
            else:
                loaded += end
        return loaded

    async def store(self, parts: Sequence[ObjectPart]) -> list[ObjectPart]:
        """Return the parts that were stored. No node reads the engine's memory afterwards."""
        runs, rest = self._runs(parts) if self._settings.zero_copy else ([], list(parts))
        works = [self._store_own(run) for run in runs] + [self._store_staged(batch) for batch in self._batches(rest)]
        ends = await asyncio.gather(*works, return_exceptions=True)
        errors = [end for end in ends if isinstance(end, BaseException)]
        stored = [part for end in ends if not isinstance(end, BaseException) for part in end]
        if errors:
            logger().warning("objects were not stored", objects=len(parts) - len(stored), error=repr(errors[0]))
        return stored

    # ----

    def _offset(self, part: ObjectPart) -> int | None:
        """Return the offset in the engine's registered memory."""
        if self._arena is None:
            return None
        start = part.address - self._arena.target().address
        return start if 0 <= start <= self._arena.length - part.size else None

    async def _load_own(self, parts: Sequence[ObjectPart]) -> list[int]:
        """Straight into the engine's memory."""
        assert self._arena is not None, "they lie in it"
        offsets = [self._offset(part) or 0 for part in parts]
        arrived = await self.objects.get([part.place for part in parts], self._arena, offsets)
        return [part.at for part, is_present in zip(parts, arrived, strict=True) if is_present]

    async def _load_staged(self, parts: Sequence[ObjectPart]) -> list[int]:
        """A silent node is waited for by the staging memory, not by the engine."""
        offsets = [0, *accumulate(part.size for part in parts)]

        def take(memory: Buffer, arrived: list[bool]) -> None:
            for part, start, is_present in zip(parts, offsets, arrived, strict=False):
                if is_present:
                    memory_at(part.address, part.size)[:] = _bytes_of(memory, start, part.size)

        async def arrive(memory: Buffer) -> list[bool]:
            return await self.objects.get([part.place for part in parts], memory, offsets[:-1])

        arrived = await staged(self._pool, offsets[-1], self._settings.timeout_s, arrive, take)
        return [part.at for part, is_present in zip(parts, arrived or (), strict=False) if is_present]

    async def _store_own(self, parts: Sequence[ObjectPart]) -> Sequence[ObjectPart]:
        """Out of the engine's memory, where they follow each other."""
        assert self._arena is not None, "they lie in it"
        source = self._arena.part(self._offset(parts[0]) or 0, sum(part.size for part in parts))
        await self.objects.put([part.place for part in parts], source)
        return parts

    async def _store_staged(self, parts: Sequence[ObjectPart]) -> Sequence[ObjectPart]:
        """A silent node is waited for by the staging memory, as for loads."""

        async def put(memory: Buffer) -> bool:
            for at, part in enumerate(parts):
                _bytes_of(memory, at * part.size, part.size)[:] = memory_at(part.address, part.size)
            await self.objects.put([part.place for part in parts], memory.part(0, len(parts) * parts[0].size))
            return True

        length, timeout_s = sum(part.size for part in parts), self._settings.timeout_s
        if not await staged(self._pool, length, timeout_s, put, lambda *_: None):
            raise DeadlineExceeded(f"not stored within {timeout_s:g} s")
        return parts

    def _batches(self, parts: Sequence[ObjectPart]) -> list[list[ObjectPart]]:
        """Divide the parts into batches of one size, each of a share of the staging memory at most."""
        batches: list[list[ObjectPart]] = []
        self._grow(max((part.size for part in parts), default=0))
        limit = self._staging_bytes // _AT_ONCE
        for member in sorted(parts, key=lambda part: part.size):
            if not batches or batches[-1][0].size != member.size or (len(batches[-1]) + 1) * member.size > limit:
                batches.append([])
            batches[-1].append(member)
        return batches

    def _grow(self, size: int) -> None:
        """Room for four objects of a size, unless a user has set how much. Transfers in the old memory end there."""
        if not self._settings.staging_bytes and _AT_ONCE * size > self._staging_bytes:
            self._staging_bytes = 1 << (_AT_ONCE * size - 1).bit_length()
            self._pool = StagingPool(self.client.asynchronous.allocate(self._staging_bytes))

    def _runs(self, parts: Sequence[ObjectPart]) -> tuple[list[list[ObjectPart]], list[ObjectPart]]:
        """Return runs of one size that are adjacent in the engine's memory, if worth a request; and the rest."""
        runs: list[list[ObjectPart]] = []
        for item in sorted(
            (member for member in parts if self._offset(member) is not None), key=lambda part: part.address
        ):
            last = runs[-1][-1] if runs else None
            if last is None or last.size != item.size or last.address + last.size != item.address:
                runs.append([])
            runs[-1].append(item)
        long = [run for run in runs if len(run) == len(parts) or len(run) * run[0].size >= _DIRECT_BYTES_MIN]
        taken = {part.at for run in long for part in run}
        return long, [part for part in parts if part.at not in taken]


def _bytes_of(memory: Buffer, start: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    assert memory.view is not None, "host memory"
    return memory.view[start : start + size]
