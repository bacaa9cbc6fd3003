"""The node's side of bandwidth scheduling: admission, renewal each epoch, and what to do when no scheduler answers."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from quire.model.errors import InvalidRequest, QuireError, ResourceExhausted
from quire.telemetry import background, counter, logger, meter, names
from quire_server import tasks
from quire_storage.core.pacing import Credit, Pacer
from quire_storage.ports import AdmissionRequest, Clock, RateGrant, RateSource

_RENEW_S_MIN = 0.005
_RENEW_S_ALONE, _RENEW_S_ALONE_MAX = 0.1, 1.0
_RETRY_S = 0.025
_GRACE_S = 0.3
_ASKING_MAX = 16
_REMEMBERED_MAX = 4096
_CREDIT_SHARE_ALONE = 0.25
_SHARES = (0.5, 0.8, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.2)


@dataclass(slots=True, eq=False)
class Allowance:
    """The rate of one delivery; changes when an epoch ends. `scheduled`: from the scheduler, not the fallback.

    `pooled`: layerwise, in the shared pool of the link; a chunkwise delivery is not. `granted`: the scheduler's last
    grant, which a new leader receives; `short`: more may come before the epoch ends.
    """

    request: AdmissionRequest
    pacer: Pacer
    layers_left: int
    scheduled: bool = False
    pooled: bool = True
    finished: bool = False
    refused: bool = False
    asking: bool = False
    reported: bool = False
    granted: int = 0
    short: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def rate_bytes_per_s(self) -> int:
        return self.pacer.rate_bytes_per_s

    def set_rate(self, rate_bytes_per_s: int, now_s: float) -> None:
        if rate_bytes_per_s != self.pacer.rate_bytes_per_s:
            self.pacer.set_rate(rate_bytes_per_s, now_s)
            self.changed.set()


class Rates:
    """Allowances of the deliveries that run.

    A scheduler that does not answer is retried for 0.3 s, the time in which a standby takes over; rates stay for
    that time. After that those without a rate share this node's cap equally, and the scheduler is retried ten times a
    second.
    """

    def __init__(self, source: RateSource, clock: Clock, link_bytes_per_s: int) -> None:
        self._source = source
        self._clock = clock
        self._link_bytes_per_s = link_bytes_per_s
        self._running: dict[str, Allowance] = {}
        self._chunkwise: dict[str, Allowance] = {}
        self._finished: OrderedDict[str, Allowance] = OrderedDict()
        self._renewal: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._renew_at_s = math.inf
        self._nap: asyncio.Future[None] | None = None
        self._answered_s = -math.inf
        self._fallen_back = False
        self._credit = Credit()
        self.advanced_bytes = 0
        self._pacing = meter().create_histogram(
            names.PACING,
            "1",
            "rate of a delivery as a share of what was granted",
            explicit_bucket_boundaries_advisory=_SHARES,
        )
        self._fallbacks = counter(names.SCHEDULER_FALLBACKS, "1", "deliveries without a word of the scheduler")

    @property
    def stats(self) -> dict[str, float]:
        """Figures for `quire status`."""
        granted = sum(allowance.rate_bytes_per_s for allowance in self._running.values())
        return {
            "rate.granted": granted,
            "rate.fallback": float(self._fallen_back),
            "rate.advanced": float(self.advanced_bytes),
        }

    def begin(self, request: AdmissionRequest, advance_bytes: int) -> Allowance:
        """No rate yet: `ask` for it, once.

        Until it is there, as much of `advance_bytes` may leave as the credit of this node's new deliveries has: the
        scheduler says how much of the link, and the rate makes up for it.
        """
        now_s = self._clock.monotonic_s()
        advance_bytes = self._credit.take(advance_bytes, now_s)
        self.advanced_bytes += advance_bytes
        allowance = Allowance(request, Pacer(0, now_s, advance_bytes), request.layers)
        self._running[request.delivery] = allowance
        return allowance

    async def ask(self, allowance: Allowance) -> None:
        """Have a rate, from the scheduler if it answers in time, else an equal share of this node's own cap."""
        request = allowance.request
        try:
            if self._fallen_back:
                self._share()  # and the next renewal asks again: no delivery waits for a scheduler that is not there
            else:
                await self._ask_patiently(allowance)
        except BaseException:
            self._drop(allowance)
            self._spawn(self._tell_finished(request.delivery))
            raise
        self._end_credit(allowance)
        self._keep_renewing()

    def admit_chunkwise(self, request: AdmissionRequest) -> Allowance:
        """No part of the pool, but of this node's port: an equal share, within the tenant's cap (§3.4)."""
        allowance = Allowance(request, Pacer(0, self._clock.monotonic_s()), request.layers, pooled=False)
        self._chunkwise[request.delivery] = allowance
        self._share_port()
        return allowance

    async def until_due(self, allowance: Allowance, size: int) -> None:
        """Wait until `size` bytes may leave, and count them as left."""
        while (wait_s := allowance.pacer.wait_s(self._clock.monotonic_s())) > 0:
            allowance.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(wait_s) else wait_s):
                    await allowance.changed.wait()
        allowance.pacer.leave(size)

    def finish(self, allowance: Allowance) -> None:
        """Give the rate back. A scheduler that does not receive it forgets the delivery after a time."""
        self._drop(allowance)
        if not allowance.pooled:
            return
        self._pacing.record(allowance.pacer.kept)
        name = allowance.request.delivery
        self._finished[name] = allowance
        while len(self._finished) > _REMEMBERED_MAX:
            self._finished.popitem(last=False)
        if allowance.granted or allowance.scheduled:
            self._spawn(self._tell_finished(name))

    async def stalled(self, delivery: str, stall_s: float) -> None:
        """The client of a delivery says for how long it waited for its layers: the scheduler learns from that, once.

        The time for which there was no rate at all is none that a rate would have changed.
        """
        allowance = self._finished.pop(delivery, None) or self._running.get(delivery)
        if allowance is None or allowance.reported or not allowance.scheduled:
            return
        allowance.reported = True
        rate = int(allowance.pacer.mean_bytes_per_s)
        if rate > 0 and allowance.request.compute_window_us:
            with contextlib.suppress(QuireError):
                await self._source.observe(allowance.request, rate, max(0.0, stall_s - allowance.pacer.stood_s))

    async def close(self) -> None:
        """Stop renewing."""
        await tasks.end([self._renewal, *self._tasks])

    # ---- asking

    async def _ask_patiently(self, allowance: Allowance) -> None:
        """Wait until there is an answer, or until it is clear that there will be none."""
        deadline_s = self._clock.monotonic_s() + _GRACE_S
        while not await self._ask(allowance):
            if self._clock.monotonic_s() >= deadline_s:
                self._fall_back()
                return
            await self._clock.sleep(_RETRY_S)

    async def _ask(self, allowance: Allowance) -> bool:
        """Admit, or admit again with the rate that it had; whether the scheduler answered at all."""
        allowance.asking = True
        try:
            grant = await self._source.admit(allowance.request, allowance.layers_left, allowance.granted)
        except (InvalidRequest, ResourceExhausted) as error:
            # This one alone: the scheduler is there and has others to serve.
            self._answered()
            logger().warning("the scheduler refuses a delivery", delivery=allowance.request.delivery, error=str(error))
            allowance.scheduled, allowance.refused = False, isinstance(error, InvalidRequest)
            self._fallbacks.add(1)
            self._share()
            return True
        except QuireError as error:
            logger().info("no rate from the scheduler", error=str(error))
            return False
        finally:
            allowance.asking = False
        self._answered()
        if allowance.finished:  # while the question was on its way
            self._spawn(self._tell_finished(allowance.request.delivery))
            return True
        self._grant(allowance, grant)
        return True

    def _keep_renewing(self) -> None:
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew(), context=background())

    async def _renew(self) -> None:
        pause_s = _RENEW_S_ALONE
        while self._running or self._fallen_back:
            if math.isinf(self._renew_at_s):
                self._renew_within(pause_s)
            await self._until_renewal()
            self._renew_at_s = math.inf
            if not (self._running or self._fallen_back):
                break
            try:
                await self._renew_once()
                pause_s = _RENEW_S_ALONE
            except QuireError as error:
                self._not_answered(error)
                pause_s = _RENEW_S_ALONE if self._running else min(2 * pause_s, _RENEW_S_ALONE_MAX)
            except Exception as error:
                logger().error("rates were not renewed", exc_info=error)
        self._renew_at_s = math.inf

    async def _until_renewal(self) -> None:
        """Sleep; `_renew_within` may cut it short."""
        while (left_s := self._renew_at_s - self._clock.monotonic_s()) > 0:
            self._nap = asyncio.ensure_future(self._clock.sleep(left_s))
            try:
                await asyncio.wait([self._nap])
            finally:
                self._nap.cancel()

    def _renew_within(self, seconds: float) -> None:
        at_s = self._clock.monotonic_s() + seconds
        if at_s < self._renew_at_s:
            self._renew_at_s = at_s
            if self._nap is not None:
                self._nap.cancel()

    async def _renew_once(self) -> None:
        """Receive the rates of this epoch. Raises `QuireError` if no scheduler answers."""
        layers_left = {name: allowance.layers_left for name, allowance in self._running.items() if allowance.scheduled}
        grants = await self._source.renew(layers_left)
        self._answered()
        granted = set()
        for grant in grants:
            granted.add(grant.delivery)
            if (allowance := self._running.get(grant.delivery)) is not None and allowance.scheduled:
                self._grant(allowance, grant)
        # A leader that is new, or that was thought gone, does not know these.
        unknown = [
            allowance
            for name, allowance in self._running.items()
            if name not in granted and not (allowance.refused or allowance.asking or allowance.finished)
        ]
        for first in range(0, len(unknown), _ASKING_MAX):
            await asyncio.gather(*map(self._ask, unknown[first : first + _ASKING_MAX]))

    def _answered(self) -> None:
        self._answered_s = self._clock.monotonic_s()
        if self._fallen_back:
            self._fallen_back = False
            logger().info("the scheduler is back")

    def _not_answered(self, error: QuireError) -> None:
        if self._clock.monotonic_s() - self._answered_s < _GRACE_S:
            self._renew_within(_RETRY_S)  # a standby may be taking over: rates stay as they are
        else:
            self._fall_back(error)

    async def _tell_finished(self, delivery: str) -> None:
        with contextlib.suppress(QuireError):
            await self._source.finish(delivery)
            if any(allowance.short for allowance in self._running.values()):
                self._renew_within(0.0)  # what it had may be theirs now

    # ---- rates

    def _grant(self, allowance: Allowance, grant: RateGrant) -> None:
        self._credit.set_rate(grant.credit_bytes_per_s, self._clock.monotonic_s())
        allowance.scheduled = True
        allowance.granted, allowance.short = grant.rate_bytes_per_s, grant.short
        self._renew_within(max(_RENEW_S_MIN, grant.left_s))
        allowance.set_rate(grant.rate_bytes_per_s, self._clock.monotonic_s())

    def _fall_back(self, error: QuireError | None = None) -> None:
        if not self._fallen_back:
            self._fallen_back = True
            logger().warning(
                "no rate from the scheduler, falling back to equal shares",
                link_bytes_per_s=self._link_bytes_per_s,
                deliveries=len(self._running),
                error=str(error or ""),
            )
        self._credit.set_rate(_CREDIT_SHARE_ALONE * self._link_bytes_per_s, self._clock.monotonic_s())
        self._fallbacks.add(1)
        for allowance in self._running.values():
            allowance.scheduled = False
        self._share()
        self._keep_renewing()

    def _share(self) -> None:
        """Equal shares of this node's cap among the deliveries without another rate, within their tenants' caps."""
        self._equally([allowance for allowance in self._running.values() if not allowance.scheduled])

    def _share_port(self) -> None:
        self._equally(list(self._chunkwise.values()))

    def _equally(self, allowances: list[Allowance]) -> None:
        of_tenant = Counter(allowance.request.tenant.tenant for allowance in allowances)
        for allowance in allowances:
            share, tenant = self._link_bytes_per_s // len(allowances), allowance.request.tenant
            cap = tenant.cap_bytes_per_s // of_tenant[tenant.tenant] if tenant.cap_bytes_per_s else share
            allowance.set_rate(max(1, min(share, cap)), self._clock.monotonic_s())

    def _drop(self, allowance: Allowance) -> None:
        name = allowance.request.delivery
        allowance.finished = True
        self._end_credit(allowance)
        allowance.pacer.set_rate(allowance.rate_bytes_per_s, self._clock.monotonic_s())
        for group, share in ((self._running, self._share), (self._chunkwise, self._share_port)):
            if group.get(name) is allowance:
                del group[name]
                share()

    def _end_credit(self, allowance: Allowance) -> None:
        self._credit.give_back(allowance.pacer.advance_bytes)
        allowance.pacer.advance_bytes = 0

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine, context=background())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
