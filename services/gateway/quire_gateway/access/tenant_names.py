"""Names of tenants, for operators: members know a tenant by the digest of its salt."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Final

from quire.model.errors import QuireError
from quire.model.hashing import tenant_name
from quire_server.clock import Clock
from quire_server.redis import AccessKeys

_REMEMBERED_S: Final = 10.0


class TenantNames:
    """The tenants that have access keys."""

    def __init__(self, keys: AccessKeys, clock: Clock) -> None:
        self._keys = keys
        self._clock = clock
        self._names: Mapping[str, str] = {}
        self._until_s = 0.0

    async def by_digest(self) -> Mapping[str, str]:
        """Return the names by `Namespace.tenant`, read every ten seconds; the last ones while Redis does not answer."""
        now_s = self._clock.monotonic_s()
        if now_s >= self._until_s:
            self._until_s = now_s + _REMEMBERED_S  # also where Redis does not answer: it is not waited for each time
            with contextlib.suppress(QuireError):
                tenants = {key.tenant for key in await self._keys.all()}
                self._names = {tenant_name(salt): tenant for tenant in tenants for salt in self._keys.salts(tenant)}
        return self._names
