"""Acts of operators that change Redis directly, on their way to a gateway's audit log."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis.asyncio as redis
from redis.exceptions import ResponseError

from quire_server.redis.connection import metadata_errors

_KEY: Final = "quire:acts"
_GROUP: Final = "gateways"
_ACTS_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class Act:
    """`by`: the user and host of the operator. `at_ms`: by Redis' clock, Unix epoch."""

    entry: str
    name: str
    subject: str
    by: str
    at_ms: int


class Acts:
    """Keeps the last 10,000 acts of all operators. One of the gateways takes each."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    async def record(self, name: str, subject: str, by: str) -> None:
        """Append an act, for one of the gateways."""
        fields: dict[Any, Any] = {"name": name, "subject": subject, "by": by}
        async with metadata_errors():
            await self._client.xadd(_KEY, fields, maxlen=_ACTS_MAX, approximate=True)

    async def take(self, gateway: str, limit: int, *, unconfirmed: bool = False) -> Sequence[Act]:
        """Return acts that no gateway has taken; `unconfirmed`: those that this gateway took and did not confirm."""
        async with metadata_errors():
            try:
                streams: Any = await self._client.xreadgroup(
                    _GROUP, gateway, {_KEY: "0" if unconfirmed else ">"}, count=limit
                )
            except ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise
                with contextlib.suppress(ResponseError):  # another gateway creates it at this moment
                    await self._client.xgroup_create(_KEY, _GROUP, id="0", mkstream=True)
                return []
            entries = [entry for _, page in streams for entry in page]
            if trimmed := [number for number, fields in entries if not fields]:
                await self._client.xack(_KEY, _GROUP, *trimmed)
        return [_act(number, fields) for number, fields in entries if fields]

    async def confirm(self, acts: Sequence[Act]) -> None:
        """Record that an audit log has the acts."""
        if acts:
            async with metadata_errors():
                await self._client.xack(_KEY, _GROUP, *(act.entry for act in acts))


def _act(number: bytes, fields: dict[bytes, bytes]) -> Act:
    name, subject, by = (fields[field].decode(errors="replace") for field in (b"name", b"subject", b"by"))
    return Act(number.decode(), name, subject, by, int(number.partition(b"-")[0]))
