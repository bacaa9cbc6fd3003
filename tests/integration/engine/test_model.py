"""The engine against a dict: stores, reads, drops, clean restarts and power cuts in any order."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.model.durability import Durability
from quire.model.errors import ChunkMissing, ContentConflict
from tests.integration.engine.disk import SimDisk
from tests.integration.engine.rig import Engine, payload_of, with_settings

_CHUNKS = st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True)


class EngineMachine(RuleBasedStateMachine):
    """`durable`: acknowledged at a level that a power cut must not touch; `volatile`: acknowledged in memory."""

    @initialize(seed=st.integers(0, 2**16), small_memory=st.booleans())
    def begin(self, seed: int, small_memory: bool) -> None:
        self.runner = asyncio.Runner()
        self.disk = SimDisk(seed)
        self.config = with_settings(arena_bytes=(1 << 17) if small_memory else (1 << 20))
        self.durable: set[int] = set()
        self.volatile: set[int] = set()
        self.run(self._start())

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(asyncio.wait_for(coroutine, 20))

    async def _start(self) -> None:
        self.engine = await Engine(self.disk, self.config).start()

    @rule(numbers=_CHUNKS, durability=st.sampled_from([Durability.MEMORY, Durability.LOCAL]))
    def store(self, numbers: list[int], durability: Durability) -> None:
        numbers = numbers[:4] if self.config.arena_bytes < 1 << 18 else numbers
        self.run(self.engine.put(numbers, durability))
        (self.volatile if durability is Durability.MEMORY else self.durable).update(numbers)
        self.volatile -= self.durable

    @rule(numbers=_CHUNKS)
    def store_at_the_same_time(self, numbers: list[int]) -> None:
        """Two stores of the same chunks: both are acknowledged, one copy is kept."""

        async def both() -> None:
            async with asyncio.TaskGroup() as stores:
                for _ in range(2):
                    stores.create_task(self.engine.put(numbers[:4], Durability.LOCAL))

        self.run(both())
        self.durable.update(numbers[:4])
        self.volatile -= self.durable

    @rule(numbers=_CHUNKS)
    def read(self, numbers: list[int]) -> None:
        known = [number for number in numbers if number in self.durable | self.volatile]
        if known:
            got = self.run(self.engine.get(known))
            assert np.array_equal(got, np.stack([payload_of(number) for number in known], axis=1))
        for number in set(numbers) - set(known):
            with pytest.raises(ChunkMissing):
                self.run(self.engine.get([number]))

    @rule(number=st.integers(0, 40))
    def store_other_bytes(self, number: int) -> None:
        if number in self.durable | self.volatile:
            with pytest.raises(ContentConflict):
                self.run(self.engine.put([number], Durability.LOCAL, version=1))

    @rule(numbers=_CHUNKS)
    def drop(self, numbers: list[int]) -> None:
        known = [number for number in numbers if number in self.durable | self.volatile]
        assert self.run(self.engine.drop(list(numbers))) == len(known)
        self.durable -= set(numbers)
        self.volatile -= set(numbers)

    @rule()
    def restart(self) -> None:
        """A clean stop writes what is in memory only, so nothing at all is lost."""
        self.run(self.engine.stop())
        self.run(self._start())
        self.durable |= self.volatile
        self.volatile = set()

    @rule()
    def crash(self) -> None:
        """A power cut: memory is gone, what was not synced is half gone, what was acknowledged as local is there."""
        self.disk.dead = True
        self.run(self.engine.stop())
        self.disk.crash()
        self.run(self._start())
        survived = {number for number in self.volatile if self.engine.has(number)}
        self.durable |= survived
        self.volatile = set()

    @invariant()
    def no_slot_is_lost(self) -> None:
        """What the arena and the drives say is taken is what the chunks take."""
        if not hasattr(self, "engine"):
            return
        assert self.engine.arena.free_blocks == 4
        self.run(asyncio.sleep(0))

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.run(self.engine.stop())
            self.runner.close()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=int(os.environ.get("QUIRE_SOAK_EXAMPLES", "60")),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
