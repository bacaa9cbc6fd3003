"""Acts of `quire keys`, which changes Redis directly, in the gateways' audit logs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol

from quire.model.errors import QuireError
from quire.telemetry import background, logger
from quire_gateway.access.audit import AuditLog
from quire_server import tasks
from quire_server.clock import Clock
from quire_server.redis.keys.acts import Act

_LOOK_S: Final = 1.0
_ACTS_AT_ONCE: Final = 100


class TakenActs(Protocol):
    """See `quire_server.redis.Acts`."""

    async def take(self, gateway: str, limit: int, *, unconfirmed: bool = False) -> Sequence[Act]: ...
    async def confirm(self, acts: Sequence[Act]) -> None: ...


class KeyActs:
    """Writes each act at one of the gateways, within two seconds. One that stopped in between writes it again."""

    def __init__(self, acts: TakenActs, audit: AuditLog, gateway: str, clock: Clock) -> None:
        self._acts = acts
        self._audit = audit
        self._gateway = gateway
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), context=background())

    async def close(self) -> None:
        await tasks.end([self._task])

    async def _run(self) -> None:
        unconfirmed = True  # of the process before this one
        while True:
            try:
                acts = await self._acts.take(self._gateway, _ACTS_AT_ONCE, unconfirmed=unconfirmed)
                for act in acts:
                    self._audit.act_elsewhere(act.name, act.subject, act.by, act.at_ms)
                await self._acts.confirm(acts)
                if acts:
                    continue
                unconfirmed = False
            except QuireError as error:
                logger().warning("acts of operators cannot be read", error=str(error))
            await self._clock.sleep(_LOOK_S)
