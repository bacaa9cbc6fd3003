"""The keys under which index and nodes know a tenant's chunks. They are derived here from those that clients name.

A client's key says nothing without the namespace that it is of: under another one it stands for another chunk, which
nobody has stored. The derivation is AES-128 over the 16-byte halves of each key, under a key for each namespace: a
permutation that can be reverted where clients are told of chunks, as in cache events. The namespace's digest contains
the tenant's salt, which admission has checked.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES128
from cryptography.hazmat.primitives.ciphers.modes import ECB

from quire.model.keys import ChunkKeys

_NAMESPACES_MAX: Final = 1024


class KeyDerivation(Protocol):
    """`tag`: first 16 bytes of the namespace's digest."""

    async def derive(self, tag: bytes, keys: ChunkKeys) -> ChunkKeys:
        """The keys that members use for these keys of a client."""

    async def revert(self, tag: bytes, keys: ChunkKeys) -> ChunkKeys:
        """The inverse of `derive`."""

    def scope(self, tag: bytes) -> bytes:
        """What a lease on derived keys names, so that a later request can derive them again; empty where none are."""


class SameKeys:
    """Of a cluster that asks for no tokens: there is one tenant, and its keys are used as they are."""

    async def derive(self, tag: bytes, keys: ChunkKeys) -> ChunkKeys:
        return keys

    async def revert(self, tag: bytes, keys: ChunkKeys) -> ChunkKeys:
        return keys

    def scope(self, tag: bytes) -> bytes:
        return b""


class DerivedKeys:
    """`read_secret`: see `quire_server.redis.key_secret`; called until it answers once."""

    def __init__(self, read_secret: Callable[[], Awaitable[bytes]]) -> None:
        self._read_secret = read_secret
        self._secret = b""
        self._ciphers: OrderedDict[bytes, Cipher[ECB]] = OrderedDict()

    async def load(self) -> None:
        """Raises what `read_secret` raises."""
        if not self._secret:
            self._secret = await self._read_secret()

    async def derive(self, tag: bytes, keys: ChunkKeys) -> ChunkKeys:
        await self.load()
        return ChunkKeys(self._cipher(tag).encryptor().update(keys.packed))

    async def revert(self, tag: bytes, keys: ChunkKeys) -> ChunkKeys:
        await self.load()
        return ChunkKeys(self._cipher(tag).decryptor().update(keys.packed))

    def scope(self, tag: bytes) -> bytes:
        return tag

    def _cipher(self, tag: bytes) -> Cipher[Any]:
        found = self._ciphers.get(tag)
        if found is None:
            key = hmac.digest(self._secret, b"quire namespace" + tag, "sha256")[:16]
            found = self._ciphers[tag] = Cipher(AES128(key), ECB())
            if len(self._ciphers) > _NAMESPACES_MAX:
                self._ciphers.popitem(last=False)
        else:
            self._ciphers.move_to_end(tag)
        return found
