"""How tasks that run beside the requests end."""

from __future__ import annotations

import asyncio

from quire_server import tasks


async def test_a_task_whose_cancellation_is_lost_is_cancelled_again() -> None:
    """Before Python 3.12 `asyncio.wait_for` loses one that comes as what it waits for is done (cpython 86296)."""
    done = asyncio.get_running_loop().create_future()

    async def work() -> None:
        await asyncio.wait_for(done, 30)
        await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    done.set_result(None)
    async with asyncio.timeout(10):
        await tasks.end([task, None], again_s=0.05)
    assert task.cancelled()


async def test_what_a_task_raises_as_it_ends_is_dropped() -> None:
    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("while it cleaned up")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    await tasks.end([task])
    assert isinstance(task.exception(), ValueError)


async def test_a_task_may_clean_up_before_it_is_cancelled_again() -> None:
    cleaned = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            cleaned.set()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    await tasks.end([task])
    assert cleaned.is_set()
