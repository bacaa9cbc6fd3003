"""A request's body: unframed, counted, and checked, in pieces of a bounded size."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from typing import IO, Final, Protocol

from quire_gateway.core.aws_chunked import AwsChunked
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.s3.checksums import BodyChecks
from quire_server.http_requests import IDLE_S

LONGEST_S = 12 * 3600.0
"""Shorter than blobs which nothing refers to are kept: none is swept while the rest of its body still comes."""
_RATE_MIN: Final = 16 << 10
_INLINE_BYTES: Final = 32 << 10
_SPOOLED_BYTES: Final = 1 << 20


class Content(Protocol):
    """Bytes from the connection."""

    async def readany(self) -> bytes:
        """Read some bytes, b"" at the end."""


class Body:
    """Read it once, by `pieces`; then `finish` returns its digests. `length`: of the payload, as announced."""

    def __init__(self, content: Content, length: int, checks: BodyChecks, framing: AwsChunked | None) -> None:
        self._content = content
        self.length = length
        self._checks = checks
        self._framing = framing
        self.size = 0

    def keep_checksum(self, algorithm: str) -> None:
        """Have `finish` return this one, too; "" for none. Raises `S3Error` if the client has declared another one."""
        self._checks.keep(algorithm)

    async def pieces(self, piece_bytes: int) -> AsyncIterator[bytes]:
        """Payload, in pieces of `piece_bytes` but for the last; none for an empty body. Raises `S3Error`.

        A thread hashes a piece while the caller has it.
        """
        loop = asyncio.get_running_loop()
        buffered: list[bytes | memoryview] = []
        have = 0
        async for payload in self._payload():
            buffered.append(payload)
            have += len(payload)
            while have >= piece_bytes:
                joined_piece = (
                    buffered[0] if len(buffered) == 1 and len(buffered[0]) == piece_bytes else b"".join(buffered)
                )
                piece, rest = bytes(joined_piece[:piece_bytes]), joined_piece[piece_bytes:]
                buffered, have = ([rest] if rest else []), len(rest)
                hashing = loop.run_in_executor(None, self._checks.update, piece)
                try:
                    yield piece
                finally:
                    await hashing
        if have:
            piece = bytes(buffered[0]) if len(buffered) == 1 else b"".join(buffered)
            if len(piece) <= _INLINE_BYTES:
                self._checks.update(piece)
                yield piece
                return
            hashing = loop.run_in_executor(None, self._checks.update, piece)
            try:
                yield piece
            finally:
                await hashing

    async def whole(self, limit: int) -> bytes:
        """Read all of it, at most `limit` bytes. Raises `S3Error` EntityTooLarge."""
        self._check_length(limit)
        return b"".join([piece async for piece in self.pieces(max(1, limit))])

    @contextlib.asynccontextmanager
    async def spooled(self, limit: int) -> AsyncIterator[IO[bytes]]:
        """All of it in a temporary file, from its start: a client may take its time. Raises as `whole` does."""
        self._check_length(limit)
        with await asyncio.to_thread(tempfile.TemporaryFile) as spool:
            async for piece in self.pieces(_SPOOLED_BYTES):
                await asyncio.to_thread(spool.write, piece)
            await asyncio.to_thread(spool.seek, 0)
            yield spool

    def _check_length(self, limit: int) -> None:
        if self.length > limit:
            raise S3Error("EntityTooLarge", f"{self.length} bytes; {limit} at most here")

    def finish(self) -> tuple[str, dict[str, str]]:
        """MD5 and checksums. Raises `S3Error` if the body differs from its announcement."""
        if self._framing is not None:
            self._framing.finish()
        if self.size != self.length:
            raise S3Error("IncompleteBody", f"{self.size} bytes came, {self.length} were announced")
        return self._checks.finish(self._framing.trailers if self._framing is not None else {})

    async def _payload(self) -> AsyncIterator[bytes | memoryview]:
        loop = asyncio.get_running_loop()
        started, received = loop.time(), 0
        while True:
            if loop.time() > started + LONGEST_S:
                raise S3Error("RequestTimeout", f"A body may take {LONGEST_S / 3600:.0f} hours; upload it in parts")
            try:
                # Idle for a minute, or slower than a modem on the whole.
                async with asyncio.timeout_at(min(loop.time(), started + received / _RATE_MIN) + IDLE_S):
                    data = await self._content.readany()
            except TimeoutError:
                raise S3Error("RequestTimeout", "Your socket connection to the server was not read from") from None
            if not data:
                return
            received += len(data)
            for payload in self._framing.feed(data) if self._framing is not None else (data,):
                self.size += len(payload)
                if self.size > self.length:
                    raise S3Error("IncompleteBody", f"More than {self.length} bytes came")
                yield payload
