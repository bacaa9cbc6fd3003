"""Notices that an access key in use was revoked (deleted, rotated or restricted) or has expired."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from quire.model.errors import QuireError, Unauthenticated
from quire.telemetry import logger
from quire.wire.credentials import AUTHORIZATION
from quire_server.clock import Clock
from quire_server.redis.keys.access import AccessKey

_LOOK_S: Final = 0.5


class Keys(Protocol):
    """The current access keys; see `KeyRing`."""

    async def get(self, name: str) -> AccessKey | None: ...


class _Use:
    """A session of a key. `revoke` is called once, when the key is revoked."""

    def __init__(self, key: AccessKey, revoke: Callable[[], None]) -> None:
        self.key = key
        self.revoke = revoke


class Revocations:
    """Compares the keys in use with the current keys twice a second. While Redis is away no key counts as revoked."""

    def __init__(self, keys: Keys, clock: Clock) -> None:
        self._keys = keys
        self._clock = clock
        self._uses: dict[str, set[_Use]] = {}

    def watch(self, key: AccessKey | None, revoke: Callable[[], None]) -> Callable[[], None]:
        """Call `revoke` if the key is revoked, until the returned function is called. `key`: None for no key."""
        if key is None:
            return lambda: None
        use = _Use(key, revoke)
        self._uses.setdefault(key.name, set()).add(use)

        def end() -> None:
            uses = self._uses.get(key.name, set())
            uses.discard(use)
            if not uses:
                self._uses.pop(key.name, None)

        return end

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self._clock.sleep(_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Look at each key in use once."""
        await asyncio.gather(*(self._look_at(name) for name in list(self._uses)))

    async def _look_at(self, name: str) -> None:
        try:
            current = await self._keys.get(name)
        except QuireError:  # Redis is away
            return
        except Exception as error:
            logger().error("an access key cannot be read", key=name, exc_info=error)
            return
        for use in [use for use in self._uses.get(name, ()) if _is_revoked(use.key, current)]:
            self._uses[name].discard(use)
            use.revoke()


def revoked_error() -> Unauthenticated:
    """The error of requests of a revoked key."""
    return Unauthenticated("this access key was deleted, rotated or restricted, or has expired", field=AUTHORIZATION)


def _is_revoked(key: AccessKey, current: AccessKey | None) -> bool:
    """Whether a use that began with `key` is more than `current` allows."""
    if current is None or (current.generation, current.tenant) != (key.generation, key.tenant):
        return True
    restricted = (current.read_only and not key.read_only) or (key.rdma and not current.rdma)
    return restricted or not set(key.grants) <= set(current.grants)
