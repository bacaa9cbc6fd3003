"""The ceiling of `quire bench s3 --against`: a server that takes any object and keeps none.

It checks no signature, makes no digest and touches no disk: what a client reaches with it, it reaches with no other
server on this machine.
"""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType
from typing import Final

import uvloop

_READ_BYTES: Final = 1 << 20


class BareHttp:
    """`async with`: a process that answers every GET with the same `size` bytes; `url`."""

    url = ""

    def __init__(self, size: int) -> None:
        self._size = size

    async def __aenter__(self) -> BareHttp:
        command = [sys.executable, "-m", "quire_bench.gateway.bare_http", str(self._size)]
        self._process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert self._process.stdout is not None
        async with asyncio.timeout(30):
            port = int(await self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        await self._process.wait()


async def _answer(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = 0
            for line in head.split("\r\n"):
                if line.startswith("content-length:"):
                    length = int(line.partition(":")[2])
                elif line.startswith("expect:"):
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            while length > 0:
                length -= len(await reader.read(min(length, _READ_BYTES)))
            sent = body if head.startswith("get") else b""
            fields = f'content-length: {len(sent)}\r\netag: "x"\r\nlast-modified: Sun, 01 Nov 2026 00:00:00 GMT'
            writer.write(f"HTTP/1.1 200 OK\r\n{fields}\r\n\r\n".encode())
            writer.write(sent)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def serve(size: int) -> None:
    """Print the port, and serve until killed."""
    body = bytes(size)
    server = await asyncio.start_server(
        lambda reader, writer: _answer(body, reader, writer), "127.0.0.1", 0, limit=_READ_BYTES
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
