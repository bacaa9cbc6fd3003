"""Acts of operators that change Redis directly, on their way to a gateway's audit log."""

from __future__ import annotations

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
    """Of all operators; the last 10,000 stay in Redis. Each is taken by one of the gateways."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    async def record(self, name: str, subject: str, by: str) -> None:
        """Append an act, for one of the gateways."""
        fields: dict[Any, Any] = {"name": name, "subject": subject, "by": by}
        async with metadata_errors():
            await self._client.xadd(_KEY, fields, maxlen=_ACTS_MAX, approximate=True)

    async def take(self, gateway: str, limit: int, *, again: bool = False) -> Sequence[Act]:
        """Return acts that no gateway has taken; `again`: those that this one took and did not confirm."""
        async with metadata_errors():
            try:
                found: Any = await self._client.xreadgroup(
                    _GROUP, gateway, {_KEY: "0" if again else ">"}, count=limit, noack=False
                )
            except ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise
                await self._client.xgroup_create(_KEY, _GROUP, id="0", mkstream=True)
                return []
        streams = found.values() if isinstance(found, dict) else [entries for _, entries in found]
        return [_act(entry, fields) for page in streams for entry, fields in _flat(page)]

    async def confirm(self, acts: Sequence[Act]) -> None:
        """They are in an audit log."""
        if acts:
            async with metadata_errors():
                await self._client.xack(_KEY, _GROUP, *(act.entry for act in acts))


def _flat(page: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """RESP3 nests the entries of a stream once more."""
    return page[0] if len(page) == 1 and isinstance(page[0], list) else page


def _act(entry: bytes, fields: dict[bytes, bytes]) -> Act:
    name, subject, by = (fields[each].decode(errors="replace") for each in (b"name", b"subject", b"by"))
    return Act(entry.decode(), name, subject, by, int(entry.partition(b"-")[0]))
