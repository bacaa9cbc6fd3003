"""A layer that is verified while it is sent."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from quire.model.errors import CorruptData
from quire_storage.core.checksums import Checksums, combined, row_checksums
from quire_storage.core.plan import SliceChecks
from quire_storage.core.pool.extents import Extent
from quire_storage.delivery.verifying import Verifying

SIZE, CHUNKS, LAYERS = 1 << 18, 24, 3
PART = 4
"""Chunks of a part: a mebibyte of neighbours."""


def _scene(bad: int | None = None) -> tuple[SliceChecks, np.ndarray]:
    """Checks of chunks that lie back to back, and the arena, in which the slice of layer 0 of chunk `bad` is wrong."""
    arena = np.random.default_rng(1).integers(0, 256, LAYERS * CHUNKS * SIZE, dtype=np.uint8)
    checksums = np.stack([row_checksums(layer.reshape(CHUNKS, SIZE)) for layer in np.split(arena, LAYERS)])
    checks = SliceChecks(checksums, np.arange(CHUNKS, dtype=np.int64) * SIZE, SIZE)
    if bad is not None:
        arena[bad * SIZE + 5] ^= 1
    return checks, arena


def test_the_sender_verifies_what_no_thread_has_begun() -> None:
    async def main() -> None:
        verifying = Verifying(*_scene(), 0, 0)
        endless = asyncio.Event()

        async def thread_that_never_starts() -> None:
            await endless.wait()

        task = verifying.begin(thread_that_never_starts())
        for chunks in (1, PART, PART + 1, CHUNKS):
            await asyncio.wait_for(verifying.until(chunks), 30)
        assert verifying._taken == CHUNKS // PART and not task.done()
        task.cancel()

    asyncio.run(main())


def test_thread_and_sender_share_the_parts() -> None:
    """No part is verified twice; the sender waits for the parts that the thread has taken."""

    async def main() -> None:
        checks, arena = _scene()
        verifying, taken = Verifying(checks, arena, 0, 0), list[tuple[int, bool]]()
        loop_thread, barrier, check = threading.get_ident(), threading.Barrier(2), checks.is_sound

        def noted(arena: np.ndarray, layer: int, shift: int, part: int) -> bool:
            if part < 2:  # the first two at the same time, one by each
                barrier.wait(30)
            taken.append((part, threading.get_ident() == loop_thread))
            return check(arena, layer, shift, part)

        checks.is_sound = noted  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as pool:

            async def in_a_thread() -> None:
                await asyncio.get_running_loop().run_in_executor(pool, verifying.work)

            verifying.begin(in_a_thread())
            await asyncio.sleep(0)
            await asyncio.wait_for(verifying.until(CHUNKS), 30)
        assert sorted(part for part, _ in taken) == list(range(CHUNKS // PART))
        assert {by_sender for part, by_sender in taken if part < 2} == {False, True}

    asyncio.run(main())


@pytest.mark.parametrize("bad", [0, 2 * PART + 1, CHUNKS - 1])
@pytest.mark.parametrize("healed", [True, False])
def test_a_corrupt_slice_is_never_sent(bad: int, healed: bool) -> None:
    """Chunks of parts before it may be sent; its own part, and the parts behind it, once it is healed."""

    async def main() -> None:
        checks, arena = _scene(bad)
        verifying = Verifying(checks, arena, 0, 0)
        corrupt_chunks, may_heal = list[int](), asyncio.Event()

        async def heal() -> None:
            while not verifying.found_corrupt:
                await asyncio.sleep(0)
            corrupt_chunks.extend(checks.corrupt(arena, 0, 0))
            await may_heal.wait()
            if not healed:
                raise CorruptData("no sound bytes")
            arena[bad * SIZE + 5] ^= 1

        task = verifying.begin(heal())
        await asyncio.wait_for(verifying.until(bad // PART * PART), 30)
        sending = asyncio.ensure_future(verifying.until(CHUNKS))
        while not corrupt_chunks:
            await asyncio.sleep(0)
        assert corrupt_chunks == [bad] and not sending.done()
        may_heal.set()
        if healed:
            await asyncio.wait_for(sending, 30)
            assert task.done() and not checks.corrupt(arena, 0, 0)
        else:
            with pytest.raises(CorruptData):
                await asyncio.wait_for(sending, 30)

    asyncio.run(main())


def test_the_first_layer_needs_no_checksums_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client waits for the first layer: the checksums of the others are combined when the second one is verified."""
    layer_counts = list[int]()

    def counted(sums: Checksums, parts: list[Extent], length: int) -> Checksums:
        layer_counts.append(len(sums))
        return combined(sums, parts, length)

    monkeypatch.setattr("quire_storage.core.plan.combined", counted)
    checks, arena = _scene()
    for layer in range(LAYERS):
        assert checks.corrupt(arena, layer, layer * CHUNKS * SIZE) == []
    assert layer_counts == [1, LAYERS]
