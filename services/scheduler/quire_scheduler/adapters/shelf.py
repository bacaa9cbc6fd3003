"""Learned curves in Redis: one value that expires."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import cbor2

from quire.telemetry import logger
from quire_scheduler.core.curves import Learned
from quire_server.redis import StoredValue

_VERSION: Final = 2
_TTL_S: Final = 7 * 24 * 3600


class RedisCurveShelf:
    """The `CurveShelf` port. Gone after a week in which nothing was learned."""

    def __init__(self, value: StoredValue) -> None:
        self._kept = value

    async def keep(self, learned: Mapping[str, Sequence[Learned]]) -> None:
        document = {
            kind: [[curve.tenant, *curve.shape, curve.seen, [list(bin_) for bin_ in curve.bins]] for curve in curves]
            for kind, curves in learned.items()
        }
        await self._kept.put(cbor2.dumps([_VERSION, document]), _TTL_S)

    async def found(self) -> dict[str, list[Learned]]:
        raw = await self._kept.get()
        if not raw:
            return {}
        try:
            version, document = cbor2.loads(raw)
            if version != _VERSION:
                return {}
            return {
                kind: [
                    Learned(
                        tenant, (size, window), observations, tuple((name, u, y, count) for name, u, y, count in bins)
                    )
                    for tenant, size, window, observations, bins in curves
                ]
                for kind, curves in document.items()
            }
        except (cbor2.CBORDecodeError, ValueError, TypeError) as error:
            logger().warning("stored curves cannot be read", error=str(error))
            return {}
