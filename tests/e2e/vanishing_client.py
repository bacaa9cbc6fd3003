"""A client that starts a large delivery and is killed in the middle of it. Prints "receiving" after the first layer."""

from __future__ import annotations

import asyncio
import sys

from quire.client import AsyncClient
from quire.model.descriptor import DeliveryOrder
from quire.model.hashing import Namespace
from quire.model.layout import Dtype, KvLayout
from tests.e2e.helpers import some_keys


async def main(gateway: str, version: str, chunks: int) -> None:
    namespace = Namespace("test", version, KvLayout(16, 16, 8, 128, Dtype.BF16))
    async with AsyncClient(gateway) as client:
        found = await client.lookup(namespace, some_keys(namespace, chunks), lease_ttl_ms=300_000)
        buffer = client.allocate(namespace.layout.payload_bytes(chunks))
        delivery = await client.fetch(found, buffer, order=DeliveryOrder.LAYERWISE)
        await delivery.layer(0)
        print("receiving", flush=True)
        await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
