"""The other side of the failure tests: a process that receives, flushes, puts once or streams on, by lines of JSON."""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np

from pyucx import Context, UcxError, Worker


async def main(role: str, transport: str) -> None:
    memory = np.zeros(8 << 20, dtype=np.uint8)
    context = Context(TLS=transport)
    async with Worker(context) as worker:
        worker.on_message(1, lambda message: None)
        region = context.register(memory)
        print(json.dumps([worker.address().hex(), region.address, region.remote_key.hex()]), flush=True)
        address, remote_address, key = json.loads(await asyncio.to_thread(sys.stdin.readline))
        endpoint = worker.connect(bytes.fromhex(address))
        remote = endpoint.remote_memory(remote_address, region.length, bytes.fromhex(key))
        endpoint.send(1, b"hello")
        try:
            if role == "flush":
                await endpoint.flush(20)
            if role == "put":
                await endpoint.put(region, 0, region.length, remote, 0, timeout_s=0.5)
            while role == "stream":
                stream = endpoint.stream(region, remote, 1)
                await stream.send(0, region.length, 0)
                stream.announce(b"round")
                await stream.drain(10)
            await asyncio.sleep(60)
        except UcxError as error:
            reached = "reached" if endpoint.reached else "never reached"
            print(json.dumps(["survived", type(error).__name__, reached]), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
