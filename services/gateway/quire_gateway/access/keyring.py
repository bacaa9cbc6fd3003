"""Access keys as the gateway knows them: read from Redis, remembered for a moment."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from quire_server.clock import Clock
from quire_server.redis.keys.access import AccessKey, AccessKeys

_REMEMBERED_S: Final = 1.0
_REMEMBERED_MAX: Final = 10_000


class KeyRing:
    """The keys of both frontends."""

    def __init__(self, keys: AccessKeys, clock: Clock) -> None:
        self._keys = keys
        self._clock = clock
        self._known: OrderedDict[str, tuple[float, AccessKey | None]] = OrderedDict()
        self.secrets, self.salts = keys.secrets, keys.salts

    async def get(self, name: str) -> AccessKey | None:
        """Read a valid key, at most a second old: for that long a deleted key is accepted. None for an expired one."""
        now_s = self._clock.monotonic_s()
        until_s, key = self._known.get(name, (0.0, None))
        if until_s > now_s:
            return self._valid(key)
        key = await self._keys.get(name)
        self._known[name] = (now_s + _REMEMBERED_S, key)
        self._known.move_to_end(name)
        if len(self._known) > _REMEMBERED_MAX:
            self._known.popitem(last=False)
        return self._valid(key)

    def _valid(self, key: AccessKey | None) -> AccessKey | None:
        return None if key is None or key.expired(self._clock.now_ms()) else key
