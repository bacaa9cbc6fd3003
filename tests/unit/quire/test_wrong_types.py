"""Values of another type are refused with what is wanted, not with an AttributeError somewhere inside."""

from __future__ import annotations

from typing import Any

import pytest

from quire.client import ImageClient, QuireClient
from quire.model.errors import InvalidRequest, KeysInvalid, LayoutInvalid
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout

_LAYOUT = KvLayout(2, 16, 2, 64, Dtype.FP16)
_KEYS: Any = [bytes(32), bytes([1]) * 32]


def test_a_layout_of_strings() -> None:
    dtype: Any = "float16"
    with pytest.raises(LayoutInvalid, match=r"'float16'; there are Dtype\.FP32, Dtype\.FP16"):
        KvLayout(2, 16, 2, 64, dtype)
    attention: Any = "mla"
    with pytest.raises(LayoutInvalid, match=r"Attention\.MLA"):
        KvLayout(2, 16, 1, 64, Dtype.FP16, attention)


@pytest.mark.parametrize("packed", [_KEYS, "00" * 32, None])
def test_keys_of_something_else(packed: Any) -> None:
    with pytest.raises(KeysInvalid, match="one bytes object"):
        ChunkKeys(packed)


async def test_a_list_of_keys() -> None:
    """No request is sent: the address is nobody's."""
    space = Namespace("m", "1", _LAYOUT)
    async with QuireClient("127.0.0.1:1") as client:
        for call in (
            client.lookup(space, _KEYS),
            client.evict(space, _KEYS),
            client.demote(space, _KEYS),
            client.retain(space, _KEYS, 1.0),
            client.end_retention(space, _KEYS),
            client.prefetch(space, _KEYS),
            client.assign(space, _KEYS, 32, []),
        ):
            with pytest.raises(KeysInvalid, match="a list; ChunkKeys are wanted"):
                await call


async def test_a_format_in_place_of_a_rendering() -> None:
    form: Any = "webp"
    async with QuireClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest, match="a Rendering is wanted"):
            await ImageClient(client).get("cat", form)
