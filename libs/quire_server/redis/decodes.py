"""Running decodes of all decoders, shared by all orchestrators."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterable, Sequence
from typing import Final, cast

import redis.asyncio as redis

from quire.model.errors import QuireError
from quire_server.core.decoding import Candidate, Choice
from quire_server.redis.connection import metadata_errors
from quire_server.redis.scripts import script

_PREFIX: Final = "quire:{decodes}:"
_TICKET_BITS: Final = 62
_LATE_S: Final = 1.0
"""After which a script that was given up has run, or will not."""


class RunningDecodes:
    """A sorted set of tickets for each decoder and for each record that is being decoded.

    They are in one slot of a Redis Cluster, so that each request is one script. A ticket that is not ended, as its
    orchestrator died, ends by itself after `lasts_ms`. A decoder that failed is passed over for `failed_ms`.
    """

    def __init__(self, client: redis.Redis, *, lasts_ms: int, failed_ms: int = 3_000) -> None:
        self._client = client
        self._lasts_ms = lasts_ms
        self._failed_ms = failed_ms
        self._forgetting: set[asyncio.Task[None]] = set()
        self._finish = client.register_script(script("decodes_finish"))
        self._route = client.register_script(script("decodes_route"))

    async def route(self, record_name: bytes, candidates: Sequence[Candidate], theta: int) -> Choice:
        """Choose a decoder and count the request there.

        Args:
            record_name: The record to be decoded, 32 bytes.
            candidates: One at least, the strongest claim on the record first.
            theta: Requests for each device of the owner above which another decoder is asked.

        Raises:
            MetadataUnavailable: Redis does not answer.
        """
        ticket = secrets.randbits(_TICKET_BITS)
        keys = [f"{_PREFIX}record:{record_name.hex()}", self._ticket(ticket)]
        args: list[str | int] = [ticket, theta, self._lasts_ms]
        for decoder in candidates:
            keys += [self._decoder(decoder.node_id), self._failed(decoder.node_id)]
            args += [decoder.node_id, decoder.build, decoder.devices, decoder.queued]
        try:
            async with metadata_errors():
                runner, owner, is_joined = await self._route(keys=keys, args=args)
        except BaseException:  # Redis may have counted it, or may do so yet
            self._forget(ticket)
            raise
        return Choice(ticket, runner - 1, owner - 1, bool(is_joined))

    async def finish(self, ticket: int, *, failed: bool = False) -> bool:
        """End a ticket; whether it was known. `failed`: its decoder did not answer.

        Raises:
            MetadataUnavailable: Redis does not answer.
        """
        async with metadata_errors():
            place = cast("bytes | None", await self._client.get(self._ticket(ticket)))
            if place is None:
                return False
            record, node_id = place.decode().split(" ", 1)
            keys = [self._ticket(ticket), record, self._decoder(node_id), self._failed(node_id)]
            ended = await self._finish(keys=keys, args=[ticket, node_id, self._failed_ms if failed else 0])
        return bool(ended)

    def _forget(self, ticket: int) -> None:
        """End the ticket of a request that was given up, after its script, which Redis may still have to run."""
        task = asyncio.create_task(self._finish_quietly(ticket))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def _finish_quietly(self, ticket: int) -> None:
        with contextlib.suppress(QuireError):  # it ends by itself
            await asyncio.sleep(_LATE_S)
            await self.finish(ticket)

    async def failed(self, node_ids: Iterable[str]) -> None:
        """Pass over decoders that did not answer.

        Raises:
            MetadataUnavailable: Redis does not answer.
        """
        async with metadata_errors():
            for node_id in node_ids:
                await self._client.set(self._failed(node_id), 1, px=self._failed_ms)

    @staticmethod
    def _ticket(ticket: int) -> str:
        return f"{_PREFIX}ticket:{ticket}"

    @staticmethod
    def _decoder(node_id: str) -> str:
        return f"{_PREFIX}decoder:{node_id}"

    @staticmethod
    def _failed(node_id: str) -> str:
        return f"{_PREFIX}failed:{node_id}"
