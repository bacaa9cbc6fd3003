"""Objects of any bytes, as LMCache, SGLang and vLLM's tiers keep them: `quire.integrations.objects`."""

from __future__ import annotations

import os

import pytest

from quire.client import QuireClient
from quire.integrations.objects import PIECE_BYTES, Objects, Owner, layout_of
from quire.model.durability import Durability
from quire.model.errors import InvalidRequest
from quire_tools.local import LocalCluster


@pytest.mark.parametrize("size", [1, 7, 4096, 131072, 200_000, 3 << 20, PIECE_BYTES, PIECE_BYTES + 4096, 80 << 20])
def test_an_object_is_cut_into_equal_pieces(size: int) -> None:
    layout, pieces = layout_of(size)
    assert layout.chunk_bytes * pieces == size and layout.chunk_bytes <= PIECE_BYTES


def test_a_size_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot be cut"):
        layout_of(1_000_003)


@pytest.mark.parametrize("size", [5000, 100_000, 2 * PIECE_BYTES + 64])
async def test_what_was_put_is_got_and_nothing_else_is(cluster: LocalCluster, size: int) -> None:
    """Neither one of another size, nor of another name, nor of another version."""
    owner = Owner(model="objects", version=os.urandom(4).hex())
    async with QuireClient(cluster.gateway_address) as client:
        objects = Objects(client, Durability.MEMORY)
        memory = client.allocate(2 * size)
        assert memory.view is not None
        here, there = memory.part(0, size), memory.part(size, size)
        place = owner.place(b"a", size)
        assert not await objects.has(place) and not await objects.get(place, there)
        wanted = os.urandom(size)
        memory.view[:size] = memoryview(wanted)
        await objects.put(place, here)
        await objects.put(place, here)
        assert await objects.has(place) and await objects.get(place, there)
        assert memory.view[size:].tobytes() == wanted
        for other in (
            owner.place(b"b", size),
            owner.place(b"a", size * 2),
            Owner(model="objects", version="another").place(b"a", size),
        ):
            assert not await objects.has(other)
        assert await objects.drop(place) and not await objects.has(place)
        memory.close()
