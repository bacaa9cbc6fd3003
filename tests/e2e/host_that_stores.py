"""A host with a cluster of its own and a client, for network namespaces.

Prints "up", waits for a line on its standard input, stores, and prints how that ended.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from quire.client import AsyncClient
from quire.model.errors import PeerLost
from quire_tools.local import LocalCluster
from tests.e2e.helpers import fresh_namespace, random_payload, some_keys

_CHUNKS = 24


async def main(folder: Path, devices: str) -> None:
    settings = {"UCX_NET_DEVICES": devices} if devices else {}
    with LocalCluster(folder, arena_bytes=96 << 20, settings=settings) as cluster:
        print("up", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        async with asyncio.timeout(20), AsyncClient(cluster.gateway_address) as client:
            print(await _store(client))


async def _store(client: AsyncClient) -> str:
    namespace = fresh_namespace()
    payload = random_payload(namespace, _CHUNKS)
    buffer = client.allocate(payload.nbytes)
    assert buffer.view is not None
    buffer.view[:] = payload.reshape(-1)
    try:
        session = await client.store(namespace, some_keys(namespace, _CHUNKS), 0, buffer)
    except PeerLost as error:
        buffer.close()
        return str(error)
    for layer in range(namespace.layout.num_layers):
        session.layer_ready(layer)
    stored = (await session.commit()).stored_chunks
    await session.quiesced(15)
    buffer.close()
    return f"stored {stored}"


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
