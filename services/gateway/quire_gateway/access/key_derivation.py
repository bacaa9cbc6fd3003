"""Derivation of the keys under which index and storage nodes know chunks from the keys that clients use.

A client key addresses a chunk within its namespace only: combined with another namespace it yields another derived key.
The derivation is AES-128 over the 16-byte halves of each key, with a cipher key for each namespace. It is a
permutation, so that cache events can be translated back. The digest of a namespace covers the tenant's salt, which
admission checks.
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

_CIPHERS_MAX: Final = 1024


class KeyDerivation(Protocol):
    """`tag`: the first 16 bytes of the namespace's digest."""

    async def derive(self, tag: bytes, keys: ChunkKeys) -> ChunkKeys:
        """Return the derived keys of client keys, in the same order."""

    async def revert(self, tag: bytes, keys: ChunkKeys) -> ChunkKeys:
        """Return the client keys of derived keys."""

    def scope(self, tag: bytes) -> bytes:
        """Return the namespace that a lease on derived keys names; empty if keys are not derived."""


class SameKeys:
    """The identity, for clusters without tokens, which have one tenant."""

    async def derive(self, tag: bytes, keys: ChunkKeys) -> ChunkKeys:
        return keys

    async def revert(self, tag: bytes, keys: ChunkKeys) -> ChunkKeys:
        return keys

    def scope(self, tag: bytes) -> bytes:
        return b""


class DerivedKeys:
    """The derivation for clusters with tokens.

    `read_secret`: reads the secret (`quire_server.redis.keys.key_secret`); called until it succeeds once.
    """

    def __init__(self, read_secret: Callable[[], Awaitable[bytes]]) -> None:
        self._read_secret = read_secret
        self._secret = b""
        self._ciphers: OrderedDict[bytes, Cipher[ECB]] = OrderedDict()

    async def load(self) -> None:
        """Read the secret, unless that is done. Raises the errors of `read_secret`."""
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
        cipher = self._ciphers.get(tag)
        if cipher is not None:
            self._ciphers.move_to_end(tag)
            return cipher
        key = hmac.digest(self._secret, b"quire namespace" + tag, "sha256")[:16]
        cipher = self._ciphers[tag] = Cipher(AES128(key), ECB())
        if len(self._ciphers) > _CIPHERS_MAX:
            self._ciphers.popitem(last=False)
        return cipher
