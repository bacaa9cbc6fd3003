"""Hashing of token lists that clients send in place of keys, in one thread, round-robin over tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from quire.model.errors import InvalidRequest
from quire.model.hashing import Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire_server.limits.turns import FairTurns

TOKENS_MAX: Final = 1 << 20


class TokenHashing:
    """Hashes in one thread: hashing holds the interpreter's lock most of the time, so that more would not be faster."""

    def __init__(self) -> None:
        self._turns = FairTurns(1)
        self._thread = ThreadPoolExecutor(1, "tokens")

    async def keys(self, namespace: Namespace, tokens: Sequence[int], tenant: str) -> ChunkKeys:
        """Return the keys of all whole chunks of the tokens, in the turn of a tenant.

        Raises:
            InvalidRequest: There are more than `TOKENS_MAX` tokens.
        """
        if len(tokens) > TOKENS_MAX:
            raise InvalidRequest(f"{len(tokens)} tokens, {TOKENS_MAX} at most; send keys instead", field="tokens")
        async with self._turns.turn(tenant):
            return await asyncio.get_running_loop().run_in_executor(self._thread, block_keys, namespace, tokens)
