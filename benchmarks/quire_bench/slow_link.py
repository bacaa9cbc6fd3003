"""A relay in front of a server on this machine, which holds each request back for a while."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

_PART_BYTES: Final = 1 << 20


class SlowLink:
    """Holds what clients send back by `delay_s`; answers pass at once. In a thread of its own.

    `slow_share` of what they send is held back by `slow_s` more. `address`: of the relay; of the server itself without
    any delay.
    """

    def __init__(self, endpoint: str, delay_s: float, slow_share: float = 0.0, slow_s: float = 0.0) -> None:
        self.address = endpoint
        self._endpoint = urlsplit(endpoint)
        self._delay_s, self._slow_share, self._slow_s = delay_s, slow_share, slow_s
        self._is_needed = delay_s > 0 or slow_share > 0
        self._random = random.Random(5)
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        if self._is_needed:
            self._thread.start()
            port = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
            self.address = f"http://127.0.0.1:{port}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_needed:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _end(self) -> None:
        self._server.close()
        relays = asyncio.all_tasks() - {asyncio.current_task()}
        for writer in self._writers:  # then their relays end
            writer.transport.abort()
        await asyncio.gather(*relays, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(self._endpoint.hostname, self._endpoint.port)
        ends = {writer, up_writer}
        self._writers |= ends
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(
                self._pass(reader, up_writer, delayed=True), self._pass(up_reader, writer, delayed=False)
            )

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, delayed: bool) -> None:
        try:
            while part := await reader.read(_PART_BYTES):
                slow = delayed and self._random.random() < self._slow_share
                if delay_s := (self._delay_s if delayed else 0.0) + (self._slow_s if slow else 0.0):
                    await asyncio.sleep(delay_s)
                writer.write(part)
                await writer.drain()
        finally:
            writer.close()
