"""The layout and the random chunks of benchmarks that deliver."""

from __future__ import annotations

from typing import Final

import numpy as np

from quire.client import AsyncClient
from quire.model.durability import Durability
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout

_STORE_CHUNKS: Final = 64
_LLAMA_KV_HEADS: Final = 8
_LLAMA_HEAD_DIM: Final = 128


def llama_layout(layers: int, chunk_tokens: int) -> KvLayout:
    """Return the layout of Llama 3.1 8B, with that many layers."""
    return KvLayout(layers, chunk_tokens, _LLAMA_KV_HEADS, _LLAMA_HEAD_DIM, Dtype.BF16)


async def fill(
    client: AsyncClient, namespace: Namespace, keys: ChunkKeys, durability: Durability = Durability.MEMORY
) -> None:
    """Store random chunks, some at a time."""
    chunks = len(keys)
    layout, step = namespace.layout, max(1, min(_STORE_CHUNKS, (256 << 20) // namespace.layout.chunk_bytes))
    buffer = client.allocate(layout.payload_bytes(step))
    assert buffer.view is not None
    buffer.view[:] = np.random.default_rng(3).integers(0, 256, buffer.length, dtype=np.uint8)
    for first in range(0, chunks, step):
        upto = keys.run(0, min(chunks, first + step))
        session = await client.store(namespace, upto, first, buffer, durability=durability)
        for layer in range(layout.num_layers):
            session.layer_ready(layer)
        await session.commit()
    buffer.close()
