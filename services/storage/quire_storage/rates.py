"""The node's side of bandwidth scheduling: admission, renewal each epoch, and what to do when no scheduler answers."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import OrderedDict
from dataclasses import dataclass, field

from quire.errors import QuireError
from quire.telemetry import logger, meter, names
from quire_storage.core.pacing import Pacer
from quire_storage.ports import AdmissionRequest, Clock, RateSource

_RENEW_S_MIN = 0.005
_RENEW_S_ALONE = 0.1
_ADMIT_TIMEOUT_S = 0.25
_REMEMBERED_MAX = 4096


@dataclass(slots=True)
class Allowance:
    """The rate of one delivery; changes when an epoch ends. `scheduled`: from the scheduler, not the fallback.

    `pooled`: layerwise, in the shared pool of the link; a chunkwise delivery is not.
    """

    request: AdmissionRequest
    pacer: Pacer
    layers_left: int
    scheduled: bool = False
    finished: bool = False
    pooled: bool = True
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def rate_bytes_per_s(self) -> int:
        return self.pacer.rate_bytes_per_s

    def set_rate(self, rate_bytes_per_s: int, now_s: float) -> None:
        if rate_bytes_per_s != self.pacer.rate_bytes_per_s:
            self.pacer.set_rate(rate_bytes_per_s, now_s)
            self.changed.set()


class Rates:
    """Allowances of the deliveries that run."""

    def __init__(self, source: RateSource, clock: Clock, link_bytes_per_s: int) -> None:
        self._source = source
        self._clock = clock
        self._link_bytes_per_s = link_bytes_per_s
        self._running: dict[str, Allowance] = {}
        self._chunkwise: dict[str, Allowance] = {}
        self._finished: OrderedDict[str, Allowance] = OrderedDict()
        self._renewal: asyncio.Task[None] | None = None
        self._epoch_left_s = _RENEW_S_ALONE
        self._fallen_back = False
        self._fallbacks = meter().create_counter(names.SCHEDULER_FALLBACKS)

    @property
    def figures(self) -> dict[str, float]:
        """For `quire status`."""
        granted = sum(allowance.rate_bytes_per_s for allowance in self._running.values())
        return {"rate.granted": granted, "rate.fallback": float(self._fallen_back)}

    async def admit(self, request: AdmissionRequest) -> Allowance:
        """A rate, from the scheduler if it answers in time, else an equal share of this node's own cap."""
        allowance = Allowance(request, Pacer(0, self._clock.monotonic_s()), request.layers)
        self._running[request.delivery] = allowance
        try:
            if self._fallen_back:
                self._share()  # and the next renewal asks again: nobody waits for a scheduler that is not there
            else:
                await self._ask(allowance)
        except BaseException:
            self._running.pop(request.delivery, None)
            raise
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew())
        return allowance

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

    async def finish(self, allowance: Allowance) -> None:
        """Give the rate back. A scheduler that does not hear it forgets the delivery by itself."""
        name = allowance.request.delivery
        allowance.finished = True
        if not allowance.pooled:
            self._chunkwise.pop(name, None)
            self._share_port()
            return
        allowance.pacer.set_rate(allowance.rate_bytes_per_s, self._clock.monotonic_s())
        self._running.pop(name, None)
        self._finished[name] = allowance
        while len(self._finished) > _REMEMBERED_MAX:
            self._finished.popitem(last=False)
        if not allowance.scheduled:
            self._share()
            return
        with contextlib.suppress(QuireError):
            await self._source.finish(name)

    async def stalled(self, delivery: str, stall_s: float) -> None:
        """The client of a delivery says for how long it waited for its layers: the scheduler learns from that."""
        allowance = self._finished.pop(delivery, None) or self._running.get(delivery)
        if allowance is None or not allowance.scheduled or not allowance.request.compute_window_us:
            return
        rate = int(allowance.pacer.mean_bytes_per_s)
        if rate > 0:
            with contextlib.suppress(QuireError):
                await self._source.observe(allowance.request, rate, stall_s)

    async def _ask(self, allowance: Allowance) -> None:
        """Admit, or admit again with the rate that it has."""
        try:
            async with asyncio.timeout(_ADMIT_TIMEOUT_S):
                held = allowance.rate_bytes_per_s if allowance.scheduled else 0
                grant = await self._source.admit(allowance.request, allowance.layers_left, held)
        except (QuireError, TimeoutError) as error:
            allowance.scheduled = False
            self._fall_back(error)
            return
        if self._fallen_back:
            self._fallen_back = False
            logger().info("the scheduler is back")
        if allowance.finished:  # while the question was on its way
            with contextlib.suppress(QuireError):
                await self._source.finish(allowance.request.delivery)
            return
        allowance.scheduled = True
        allowance.set_rate(grant.rate_bytes_per_s, self._clock.monotonic_s())
        self._epoch_left_s = grant.left_s

    async def _renew(self) -> None:
        while self._running:
            wait_s = _RENEW_S_ALONE if self._fallen_back else self._epoch_left_s
            await self._clock.sleep(max(_RENEW_S_MIN, wait_s))
            known = {name: each.layers_left for name, each in self._running.items() if each.scheduled}
            granted: set[str] = set()
            if known:
                try:
                    grants = await self._source.renew(known)
                except QuireError as error:
                    self._fall_back(error)
                    continue
                for grant in grants:
                    granted.add(grant.delivery)
                    self._epoch_left_s = grant.left_s
                    if (allowance := self._running.get(grant.delivery)) is not None:
                        allowance.set_rate(grant.rate_bytes_per_s, self._clock.monotonic_s())
            # A leader that is new, or that was thought gone, does not know these.
            for name, allowance in list(self._running.items()):
                if name not in granted and not allowance.finished:
                    await self._ask(allowance)
                    if self._fallen_back:
                        break

    def _fall_back(self, error: QuireError | TimeoutError) -> None:
        if not self._fallen_back:
            self._fallen_back = True
            logger().warning(
                "no rate from the scheduler, falling back to equal shares",
                link_bytes_per_s=self._link_bytes_per_s,
                deliveries=len(self._running),
                error=str(error) or type(error).__name__,
            )
        self._fallbacks.add(1)
        for allowance in self._running.values():
            allowance.scheduled = False
        self._share()

    def _share_port(self) -> None:
        for allowance in self._chunkwise.values():
            share = self._link_bytes_per_s // len(self._chunkwise)
            cap = allowance.request.tenant.cap_bytes_per_s or share
            allowance.set_rate(min(share, cap), self._clock.monotonic_s())

    def _share(self) -> None:
        """Equal shares of this node's cap among the deliveries that have no other rate."""
        alone = [allowance for allowance in self._running.values() if not allowance.scheduled]
        for allowance in alone:
            allowance.set_rate(self._link_bytes_per_s // len(alone), self._clock.monotonic_s())
