"""Joint calls: callers who wait while a call runs share the next call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar

from quire.telemetry import background

Item = TypeVar("Item")
Answer = TypeVar("Answer")
_ITEMS_MAX: Final = 64


class JoinedCalls(Generic[Item, Answer]):
    """Joins calls for an item each into calls for several, without a delay for a single caller.

    Args:
        call: Takes up to 64 items and returns an answer for each. Each caller of a call that fails gets its error.
    """

    def __init__(self, call: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]]) -> None:
        self._call = call
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._callers = 0
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, item: Item) -> Answer:
        """Return the answer for one item."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answer))
        self._callers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run(), context=background())
        try:
            return await answer
        finally:
            self._callers -= 1
            if not self._callers and self._task is not None:  # all of them have given up
                self._task.cancel()

    async def _run(self) -> None:
        batch: list[tuple[Item, asyncio.Future[Answer]]] = []
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:_ITEMS_MAX], self._waiting[_ITEMS_MAX:]
                batch = [(item, answer) for item, answer in batch if not answer.done()]
                if batch:
                    await self._ask(batch)
        finally:
            self._task = None
            if self._waiting and self._callers:  # they came while this was cancelled
                self._task = asyncio.create_task(self._run(), context=background())

    async def _ask(self, batch: Sequence[tuple[Item, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._call([item for item, _ in batch])
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)
