"""Room that is reserved for what tenants write: a hash for each limited tenant, which all processes share."""

from __future__ import annotations

from typing import Final, NamedTuple, cast

import redis.asyncio as redis

from quire_server.redis.connection import metadata_errors
from quire_server.redis.scripts import script

_KEY: Final = "quire:reserved:"
_NEXT: Final = b"next"
RESERVATION_MS: Final = 3_600_000
"""After this time a reservation ends by itself, as its process may be dead."""


class Reservation(NamedTuple):
    """Room for bytes that a tenant is writing.

    Attributes:
        tenant: Name of the tenant.
        number: Grows with each reservation of the tenant.
        earlier_bytes: Of the reservations before it, when it was made.
    """

    tenant: str
    number: int
    earlier_bytes: int


class Reservations:
    """See `quire_server.quotas.Quotas`."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._add = client.register_script(script("reservations_add"))

    async def add(self, tenant: str, reserved_bytes: int) -> Reservation:
        """Reserve room, whether there is any or not.

        Raises:
            MetadataUnavailable: Redis does not answer.
        """
        async with metadata_errors():
            number, earlier = await self._add(keys=[_KEY + tenant], args=[reserved_bytes, RESERVATION_MS])
        return Reservation(tenant, int(number), int(earlier))

    async def earlier_bytes(self, reservation: Reservation) -> int:
        """Return the bytes of the reservations before this one that have not ended.

        Raises:
            MetadataUnavailable: Redis does not answer.
        """
        async with metadata_errors():
            reserved = cast(dict[bytes, bytes], await self._client.hgetall(_KEY + reservation.tenant))
        sizes = {int(number): int(value.partition(b":")[2]) for number, value in reserved.items() if number != _NEXT}
        return sum(size for number, size in sizes.items() if number < reservation.number)

    async def end(self, reservation: Reservation) -> None:
        """Give the room back: its bytes are stored, or will not be.

        Raises:
            MetadataUnavailable: Redis does not answer.
        """
        async with metadata_errors():
            await self._client.hdel(_KEY + reservation.tenant, str(reservation.number))
