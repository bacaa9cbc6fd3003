"""The node's side of bandwidth scheduling: admission, renewal each epoch, and what to do when no scheduler answers."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from quire.errors import QuireError
from quire.telemetry import logger, meter, names
from quire_storage.core.pacing import Pacer
from quire_storage.ports import Clock, RateSource

_RENEW_S_MIN = 0.02
_ADMIT_TIMEOUT_S = 0.25


@dataclass(slots=True)
class Allowance:
    """The rate of one delivery; changes when an epoch ends. `scheduled`: from the scheduler, not the fallback."""

    delivery: str
    pacer: Pacer
    layers_left: int
    scheduled: bool

    @property
    def rate_bytes_per_s(self) -> int:
        return self.pacer.rate_bytes_per_s


class Rates:
    """Allowances of the deliveries that run."""

    def __init__(self, source: RateSource, clock: Clock, link_bytes_per_s: int) -> None:
        self._source = source
        self._clock = clock
        self._link_bytes_per_s = link_bytes_per_s
        self._running: dict[str, Allowance] = {}
        self._renewal: asyncio.Task[None] | None = None
        self._epoch_left_s = 0.1
        self._fallbacks = meter().create_counter(names.SCHEDULER_FALLBACKS)

    async def admit(self, delivery: str, bytes_per_layer: int, compute_window_us: int, layers: int) -> Allowance:
        """A rate, from the scheduler if it answers in time, else an equal share of this node's own cap."""
        share = self._link_bytes_per_s // (len(self._running) + 1)
        allowance = Allowance(delivery, Pacer(share, self._clock.monotonic_s()), layers, scheduled=False)
        self._running[delivery] = allowance
        try:
            async with asyncio.timeout(_ADMIT_TIMEOUT_S):
                grant = await self._source.admit(delivery, bytes_per_layer, compute_window_us, layers)
        except (QuireError, TimeoutError) as error:
            self._fallbacks.add(1)
            logger().warning(
                "no rate from the scheduler, falling back to an equal share",
                delivery=delivery,
                bytes_per_s=share,
                error=str(error),
            )
        except BaseException:
            del self._running[delivery]
            raise
        else:
            allowance.pacer.rate_bytes_per_s = grant.rate_bytes_per_s
            allowance.scheduled = True
            self._epoch_left_s = grant.epoch_left_s
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew())
        return allowance

    async def finish(self, allowance: Allowance, bytes_moved: int, duration_s: float) -> None:
        """Give the rate back. A scheduler that does not hear it forgets the delivery by itself."""
        self._running.pop(allowance.delivery, None)
        if allowance.scheduled:
            with contextlib.suppress(QuireError):
                await self._source.finish(allowance.delivery, bytes_moved, duration_s)

    async def _renew(self) -> None:
        while self._running:
            await self._clock.sleep(max(_RENEW_S_MIN, self._epoch_left_s))
            layers_left = {
                name: allowance.layers_left for name, allowance in self._running.items() if allowance.scheduled
            }
            if not layers_left:
                continue
            try:
                grants = await self._source.renew(layers_left)
            except QuireError as error:
                self._fall_back(error)
                continue
            for grant in grants:
                if (allowance := self._running.get(grant.delivery)) is not None:
                    allowance.pacer.rate_bytes_per_s = grant.rate_bytes_per_s
                self._epoch_left_s = grant.epoch_left_s

    def _fall_back(self, error: QuireError) -> None:
        share = self._link_bytes_per_s // max(1, len(self._running))
        for allowance in self._running.values():
            allowance.pacer.rate_bytes_per_s, allowance.scheduled = share, False
        self._fallbacks.add(len(self._running))
        logger().warning("the scheduler is gone, falling back to equal shares", bytes_per_s=share, error=str(error))
