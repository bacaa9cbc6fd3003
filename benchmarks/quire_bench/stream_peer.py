"""The baseline of the delivery benchmark: a process that does nothing but stream contiguous layers by pyucx's port."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from types import TracebackType

import numpy as np
import uvloop

from quire.client import Buffer
from quire.model.descriptor import RdmaTarget
from quire.transport import ucx_transport
from quire.transport.pages import anonymous_memory


class BareStream:
    """`async with`: a peer process that on each `round()` streams `layers` layers of `layer_bytes` into `target`."""

    def __init__(self, layer_bytes: int, layers: int, target: Buffer) -> None:
        self._layer_bytes = layer_bytes
        self._layers = layers
        self._target = target
        self._transport = ucx_transport()
        self._arrivals: asyncio.Queue[bytes] = asyncio.Queue()

    async def __aenter__(self) -> BareStream:
        await self._transport.start()
        self._transport.on_message(self._arrivals.put_nowait)
        assert self._target.view is not None
        region = self._transport.register(self._target.view)
        target = [self._transport.address.hex(), region.address, region.length, region.remote_key.hex()]
        command = [sys.executable, "-m", "quire_bench.stream_peer", str(self._layer_bytes), str(self._layers)]
        self._process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(target).encode() + b"\n")
        async with asyncio.timeout(60):
            address = bytes.fromhex((await self._process.stdout.readline()).decode().strip())
        self._peer = self._transport.connect(address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        await self._process.wait()
        await self._transport.close()

    async def round(self) -> tuple[float, float]:
        """Seconds until the last layer and until the first."""
        first = 0.0
        with self._transport.expecting():
            started = time.perf_counter()
            self._peer.send(b"go")
            for layer in range(self._layers):
                async with asyncio.timeout(60):
                    await self._arrivals.get()
                if layer == 0:
                    first = time.perf_counter() - started
        return time.perf_counter() - started, first


async def serve(layer_bytes: int, layers: int) -> None:
    """The peer: read the target from standard input, answer with this worker's address, stream when told to."""
    worker, address, length, key = json.loads(sys.stdin.readline())
    transport = ucx_transport()
    await transport.start()
    asked: asyncio.Queue[bytes] = asyncio.Queue()
    transport.on_message(asked.put_nowait)
    # Two layers in turn stand for all: each is far larger than any cache, and the machine need not hold a third copy.
    source = np.frombuffer(anonymous_memory(layer_bytes * 2), dtype=np.uint8)
    source.fill(1)
    region = transport.register(source)
    target = RdmaTarget(bytes.fromhex(worker), address, length, bytes.fromhex(key))
    peer = transport.connect(target.worker_address)
    remote = await peer.remote(target)
    print(transport.address.hex(), flush=True)
    while peer.error is None:
        with transport.expecting():
            await asked.get()
        stream = peer.stream(region, remote)
        for layer in range(layers):
            await stream.send(layer % 2 * layer_bytes, layer_bytes, layer * layer_bytes)
            stream.announce(b"layer")
        await stream.drain(60)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
