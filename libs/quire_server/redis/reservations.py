"""Room that is reserved for what tenants write: a hash for each limited tenant, which all processes share."""

from __future__ import annotations

import os
from typing import Final, NamedTuple, cast

import redis.asyncio as redis

from quire_server.redis.connection import metadata_errors
from quire_server.redis.scripts import script

_KEY: Final = "quire:reserved:"
_NEXT: Final = b"next"
RESERVATION_MS: Final = 900_000
"""After this time without a renewal a reservation ends by itself, as its process may be dead."""


class Reservation(NamedTuple):
    """Room for bytes that a tenant is writing.

    Attributes:
        tenant: Name of the tenant.
        name: Its own, at random.
        reserved_bytes: Size.
        number: Grows with each reservation of the tenant.
        earlier_bytes: Of the reservations before it, when it was made.
    """

    tenant: str
    name: str
    reserved_bytes: int
    number: int
    earlier_bytes: int


class Reservations:
    """See `quire_server.limits.quotas.Quotas`."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._add = client.register_script(script("reservations_add"))
        self._renew = client.register_script(script("reservations_renew"))

    async def add(self, tenant: str, reserved_bytes: int) -> Reservation:
        """Reserve room, whether there is any or not.

        Raises:
            MetadataUnavailable: Redis does not answer.
        """
        name = os.urandom(8).hex()
        async with metadata_errors():
            number, earlier = await self._add(keys=[_KEY + tenant], args=[name, reserved_bytes, RESERVATION_MS])
        return Reservation(tenant, name, reserved_bytes, int(number), int(earlier))

    async def renew(self, reservation: Reservation) -> None:
        """Make a reservation last for another `RESERVATION_MS`.

        Raises:
            MetadataUnavailable: Redis does not answer.
        """
        args: list[str | int] = [reservation.name, reservation.reserved_bytes, reservation.number, RESERVATION_MS]
        async with metadata_errors():
            await self._renew(keys=[_KEY + reservation.tenant], args=args)

    async def earlier_bytes(self, reservation: Reservation) -> int:
        """Return the bytes of the reservations before this one that have not ended.

        Raises:
            MetadataUnavailable: Redis does not answer.
        """
        async with metadata_errors():
            reserved = cast(dict[bytes, bytes], await self._client.hgetall(_KEY + reservation.tenant))
        values = (value.split(b":") for name, value in reserved.items() if name != _NEXT)
        return sum(int(size) for _, size, number in values if int(number) < reservation.number)

    async def end(self, reservation: Reservation) -> None:
        """Give the room back: its bytes are stored, or will not be.

        Raises:
            MetadataUnavailable: Redis does not answer.
        """
        async with metadata_errors():
            await self._client.hdel(_KEY + reservation.tenant, reservation.name)
