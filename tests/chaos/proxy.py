"""A TCP proxy that can drop answers: requests arrive and are carried out, and their callers receive nothing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

_PIECE_BYTES = 1 << 16
_WAIT_S = 10.0


class Proxy:
    """Listens on a port of `host` for each of `targets` (host:port). Serves in a thread of its own until `close`."""

    def __init__(self, host: str, targets: Sequence[str]) -> None:
        self._host = host
        self._targets = targets
        self._drops = False
        self._healed = 0
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._servers = [self._run(self._listen(target)) for target in targets]
        self.addresses = [f"{host}:{server.sockets[0].getsockname()[1]}" for server in self._servers]

    def drop_answers(self) -> None:
        """Drop what the targets send from now on."""
        self._drops = True

    def pass_answers(self) -> None:
        """Break the connections whose answers were dropped; new ones are served."""
        self._loop.call_soon_threadsafe(self._heal)

    def close(self) -> None:
        """Stop listening and break all connections."""
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WAIT_S)
        self._loop.close()

    def _run(self, work: Coroutine[None, None, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_WAIT_S)

    async def _listen(self, target: str) -> asyncio.Server:
        host, _, port = target.rpartition(":")

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._connections.add(task)
            with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.CancelledError):
                try:
                    to_reader, to_writer = await asyncio.open_connection(host, int(port))
                    with contextlib.closing(to_writer):
                        await self._connect(reader, writer, to_reader, to_writer)
                finally:
                    self._connections.discard(task)

        return await asyncio.start_server(serve, self._host, 0)

    async def _connect(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        to_reader: asyncio.StreamReader,
        to_writer: asyncio.StreamWriter,
    ) -> None:
        """Copy both ways until either side ends."""
        ways = [
            asyncio.create_task(self._copy(reader, to_writer, answers=False)),
            asyncio.create_task(self._copy(to_reader, writer, answers=True)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool) -> None:
        began = self._healed
        while data := await source.read(_PIECE_BYTES):
            if not answers or (began == self._healed and not self._drops):
                sink.write(data)
                await sink.drain()

    def _heal(self) -> None:
        self._drops = False
        self._healed += 1
        self._break()

    def _break(self) -> None:
        for task in self._connections:
            task.cancel()

    async def _stop(self) -> None:
        for server in self._servers:
            server.close()
        tasks = list(self._connections)
        self._break()
        await asyncio.gather(*tasks, return_exceptions=True)
