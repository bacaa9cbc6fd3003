"""Ends the requests and sessions of an access key when the key is revoked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from quire.model.errors import QuireError, Unauthenticated
from quire.wire.credentials import AUTHORIZATION
from quire_server.clock import Clock
from quire_server.redis.access import AccessKey

_LOOK_S: Final = 0.5


class Keys(Protocol):
    """The current access keys; see `KeyRing`."""

    async def get(self, name: str) -> AccessKey | None: ...


class _Use:
    """A request or a session of a key. `revoke` is called once, when the key is revoked."""

    def __init__(self, key: AccessKey, revoke: Callable[[], None]) -> None:
        self.key = key
        self.revoke = revoke


class Revocations:
    """Compares the keys in use with the current keys twice a second. While Redis is away no key counts as revoked."""

    def __init__(self, keys: Keys, clock: Clock) -> None:
        self._keys = keys
        self._clock = clock
        self._uses: dict[str, set[_Use]] = {}

    @contextlib.contextmanager
    def using(self, key: AccessKey | None, revoke: Callable[[], None]) -> Iterator[None]:
        """Call `revoke` if the key is revoked before the end of the context. `key`: None for a caller without one."""
        if key is None:
            yield
            return
        use = _Use(key, revoke)
        self._uses.setdefault(key.name, set()).add(use)
        try:
            yield
        finally:
            uses = self._uses[key.name]
            uses.discard(use)
            if not uses:
                del self._uses[key.name]

    @contextlib.contextmanager
    def request(self, key: AccessKey | None) -> Iterator[None]:
        """Cancel the current task if the key is revoked. Raises `Unauthenticated` then."""
        task = asyncio.current_task()
        revoked = False

        def cancel() -> None:
            nonlocal revoked
            revoked = True
            if task is not None:
                task.cancel()

        with self.using(key, cancel):
            try:
                yield
            except asyncio.CancelledError:
                if not revoked or task is None or task.uncancel():
                    raise
                raise revoked_error() from None

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self._clock.sleep(_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Look at each key in use once."""
        for name in list(self._uses):
            try:
                current = await self._keys.get(name)
            except QuireError:  # the keys cannot be read now
                continue
            for use in list(self._uses.get(name, ())):
                if _is_revoked(use.key, current):
                    self._uses[name].discard(use)
                    use.revoke()


def revoked_error() -> Unauthenticated:
    """The error of requests and sessions that a revocation ends."""
    return Unauthenticated("this access key was deleted, rotated or restricted", field=AUTHORIZATION)


def _is_revoked(key: AccessKey, current: AccessKey | None) -> bool:
    """Whether a use that began with `key` is more than `current` allows."""
    if current is None or (current.generation, current.tenant) != (key.generation, key.tenant):
        return True
    restricted = (current.read_only and not key.read_only) or (key.rdma and not current.rdma)
    return restricted or not set(key.grants) <= set(current.grants)
