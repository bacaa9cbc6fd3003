"""Range reads of the object tier: as many at a time as it bears, slow ones sent twice, refused ones again later."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from quire.model.chunk_object import ObjectRange
from quire.model.errors import QuireError
from quire.telemetry import names, tally
from quire_storage.core.object_reads import Hedging, RequestWindow, TierSpeed
from quire_storage.errors import ObjectTierFailed, ObjectTierThrottled
from quire_storage.ports import Clock, ObjectName, ObjectTier

_TRIES: Final = 4
_BACK_OFF_S: Final = 0.1

Read = Callable[[], Coroutine[Any, Any, ObjectRange | None]]


class _NoAnswer(ObjectTierFailed):
    """A request without an answer, which is not repeated: the next one would wait for as long."""


class _Race:
    """Requests for the same range: the first sound answer counts, and an error once none is under way."""

    def __init__(self, read: Read, loop: asyncio.AbstractEventLoop) -> None:
        self._read, self._loop = read, loop
        self._requests: list[asyncio.Task[ObjectRange | None]] = []
        self.answer: asyncio.Future[ObjectRange | None] = loop.create_future()

    def enter(self) -> None:
        """Send the request, or send it once more."""
        request = self._loop.create_task(self._read())
        self._requests.append(request)
        request.add_done_callback(self._ended)

    def fail(self, error: QuireError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def end(self) -> None:
        """Cancel the requests that are under way."""
        for request in self._requests:
            request.cancel()

    def _ended(self, request: asyncio.Task[ObjectRange | None]) -> None:
        error = None if request.cancelled() else request.exception()
        if self.answer.done():
            return
        if error is None and not request.cancelled():
            self.answer.set_result(request.result())
        elif all(request_.done() for request_ in self._requests):
            self.answer.set_exception(error or ObjectTierFailed("the request was cancelled"))


@dataclass(order=True, slots=True)
class _Turn:
    due_s: float
    number: int
    ready: asyncio.Future[None] = field(compare=False)


class ObjectReads:
    """Requests of all deliveries of a node.

    Of several tenants that wait, the one with the fewest requests in flight has the next; of one tenant's requests the
    one whose bytes are needed first.
    """

    def __init__(self, tier: ObjectTier, clock: Clock, timeout_s: float) -> None:
        self._tier = tier
        self._clock = clock
        self._timeout_s = timeout_s
        self._window, self._hedging = RequestWindow(), Hedging()
        self._waiting: dict[str, list[_Turn]] = {}
        self._in_flight: Counter[str] = Counter()
        self._total = self._number = 0
        self._outcomes = Counter[str]({"read": 0, "hedged": 0, "throttled": 0, "failed": 0})
        tally(
            names.OBJECT_READS,
            "1",
            "range reads of the object tier, by outcome",
            lambda: [(count, {"outcome": outcome}) for outcome, count in self._outcomes.items()],
        )

    @property
    def speed(self) -> TierSpeed:
        """The tier, as measured so far."""
        return self._window.speed

    async def read(
        self,
        name: ObjectName,
        start: int,
        stop: int,
        *,
        tenant: str = "",
        due_s: float = 0.0,
        described: bool = True,
    ) -> ObjectRange | None:
        """Read bytes [start, stop) of an object; None if there is no such object.

        Args:
            name: Of the object.
            start: Of the range.
            stop: Its end, exclusive.
            tenant: Whose turn it takes.
            due_s: When the bytes are needed, on the node's monotonic clock.
            described: With the object's size, and its header where the tier has it.

        Raises:
            ObjectTierFailed: No answer within the time of a request, or a refusal, after several attempts.
        """
        for attempt in range(_TRIES):
            if self._total < self._window.limit and not self._waiting:
                self._begin(tenant)
            else:
                await self._turn(tenant, due_s)
            began_s = self._clock.monotonic_s()
            try:
                return await self._request(
                    partial(self._tier.read, name, start, stop, described=described), stop - start
                )
            except ObjectTierThrottled:
                self._window.throttled(began_s, self._clock.monotonic_s())
                self._outcomes["throttled"] += 1
                if attempt + 1 == _TRIES:
                    raise
            except QuireError as error:
                self._outcomes["failed"] += 1
                if attempt + 1 == _TRIES or isinstance(error, _NoAnswer):
                    raise
            finally:
                self._leave(tenant)
            await self._clock.sleep(_BACK_OFF_S * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    async def _request(self, read: Read, size: int) -> ObjectRange | None:
        """Read once; once more if the answer is late, and take whichever comes first."""
        began_s, loop, late_s = self._clock.monotonic_s(), asyncio.get_running_loop(), self._hedging.after_s(size)
        self._hedging.began()
        race = _Race(read, loop)

        def late() -> None:
            if self._hedging.take():
                self._outcomes["hedged"] += 1
                race.enter()

        def too_late() -> None:
            race.fail(_NoAnswer(f"no answer of the object tier within {self._timeout_s:g} s"))

        timers = [loop.call_later(self._timeout_s, too_late)]
        if late_s is not None and late_s < self._timeout_s:
            timers.append(loop.call_later(late_s, late))
        try:
            race.enter()
            part = await race.answer
        finally:
            for timer in timers:
                timer.cancel()
            race.end()
        self._outcomes["read"] += 1
        if part is not None:
            now_s = self._clock.monotonic_s()
            self._hedging.ended(size, now_s - began_s)
            self._window.ended(size, now_s - began_s, now_s)
        return part

    async def _turn(self, tenant: str, due_s: float) -> None:
        """Wait for the tenant's turn."""
        self._number += 1
        turn = _Turn(due_s, self._number, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting.setdefault(tenant, []), turn)
        try:
            await turn.ready
        except asyncio.CancelledError:
            if turn.ready.done() and not turn.ready.cancelled():
                self._leave(tenant)
            raise

    def _begin(self, tenant: str) -> None:
        self._in_flight[tenant] += 1
        self._total += 1

    def _leave(self, tenant: str) -> None:
        self._in_flight[tenant] -= 1
        if not self._in_flight[tenant]:
            del self._in_flight[tenant]
        self._total -= 1
        while self._waiting and self._total < self._window.limit:
            chosen = min(self._waiting, key=lambda tenant: self._in_flight[tenant])
            turn = heapq.heappop(self._waiting[chosen])
            if not self._waiting[chosen]:
                del self._waiting[chosen]
            if not turn.ready.done():
                self._begin(chosen)
                turn.ready.set_result(None)
        if not self._total:
            self._window.idle(self._clock.monotonic_s())
