"""Range reads of the object tier: as many at a time as it bears, slow ones sent twice, refused ones again later."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from quire.model.chunk_object import ObjectRange
from quire.model.errors import QuireError
from quire.telemetry import counter, names
from quire_storage.core.object_reads import Hedging, RequestWindow, TierSpeed
from quire_storage.errors import ObjectTierFailed, ObjectTierThrottled
from quire_storage.ports import Clock, ObjectName, ObjectTier

_TRIES: Final = 4
_BACK_OFF_S: Final = 0.1
_OUTCOMES: Final = tuple({"outcome": outcome} for outcome in ("read", "hedged", "throttled", "failed"))


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
        self._requests = counter(names.OBJECT_READS, "1", "range reads of the object tier, by outcome", _OUTCOMES)

    @property
    def speed(self) -> TierSpeed:
        """The tier, as measured so far."""
        return self._window.speed

    async def read(
        self, name: ObjectName, start: int, stop: int, *, tenant: str = "", due_s: float = 0.0
    ) -> ObjectRange | None:
        """Read bytes [start, stop) of an object; None if there is no such object.

        Args:
            name: Of the object.
            start: Of the range.
            stop: Its end, exclusive.
            tenant: Whose turn it takes.
            due_s: When the bytes are needed, on the node's monotonic clock.

        Raises:
            ObjectTierFailed: No answer within the time of a request, or a refusal, after several attempts.
        """
        for attempt in range(_TRIES):
            await self._enter(tenant, due_s)
            began_s = self._clock.monotonic_s()
            try:
                async with asyncio.timeout(self._timeout_s):  # the time until its turn does not count
                    return await self._hedged(name, start, stop)
            except TimeoutError:
                self._requests.add(1, {"outcome": "failed"})
                raise ObjectTierFailed(f"no answer of the object tier within {self._timeout_s:g} s") from None
            except ObjectTierThrottled:
                self._window.throttled(began_s, self._clock.monotonic_s())
                self._requests.add(1, {"outcome": "throttled"})
                if attempt + 1 == _TRIES:
                    raise
            except QuireError:
                self._requests.add(1, {"outcome": "failed"})
                if attempt + 1 == _TRIES:
                    raise
            finally:
                self._leave(tenant)
            await self._clock.sleep(_BACK_OFF_S * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    async def _hedged(self, name: ObjectName, start: int, stop: int) -> ObjectRange | None:
        """Read once; once more if the answer is late, and take whichever comes first."""
        size, began_s, loop = stop - start, self._clock.monotonic_s(), asyncio.get_running_loop()
        self._hedging.began()
        requests = {loop.create_task(self._tier.read(name, start, stop))}
        try:
            late_s = self._hedging.after_s(size)
            done, _ = await asyncio.wait(requests, timeout=late_s)
            if not done and self._hedging.take():
                self._requests.add(1, {"outcome": "hedged"})
                requests.add(loop.create_task(self._tier.read(name, start, stop)))
            while True:
                done, pending = await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
                sound = [request for request in done if request.exception() is None]
                if sound or not pending:
                    break
                requests = pending
            part = (sound or list(done))[0].result()
        finally:
            for request in requests:
                request.cancel()
        took_s = self._clock.monotonic_s() - began_s
        if part is not None:
            self._hedging.ended(size, took_s)
            self._window.ended(size, took_s, self._clock.monotonic_s())
        self._requests.add(1, {"outcome": "read"})
        return part

    async def _enter(self, tenant: str, due_s: float) -> None:
        if self._total < self._window.limit and not self._waiting:
            self._begin(tenant)
            return
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
            self._window.idle()
