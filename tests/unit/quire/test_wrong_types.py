"""Values of another type are refused with the expected type, and not by an AttributeError."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.client import AsyncClient, ImageClient
from quire.model.errors import InvalidRequest, KeysInvalid, LayoutInvalid
from quire.model.hashing import HashAlgorithm, Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout

_LAYOUT = KvLayout(2, 16, 2, 64, Dtype.FP16)
_SPACE = Namespace("m", "1", _LAYOUT)
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


def test_tokens_of_arrays_are_those_of_lists() -> None:
    tokens = list(range(70))
    expected = block_keys(_SPACE, tokens)
    assert len(expected) == 4
    arrays: list[Any] = [np.arange(70), np.arange(70, dtype=np.uint16), torch.arange(70), tuple(tokens)]
    for same in (*arrays, [np.int64(token) for token in tokens]):
        assert block_keys(_SPACE, same) == expected
    assert len(block_keys(_SPACE, [])) == len(block_keys(_SPACE, np.zeros(0, np.int64))) == 0


@pytest.mark.parametrize("algorithm", HashAlgorithm)
@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        (np.zeros((2, 64), np.int64), r"shape \(2, 64\)"),
        (torch.zeros(1, 64, dtype=torch.int64), r"shape \(1, 64\)"),
        (np.zeros(64), "float"),
        ([1.0] * 64, "float"),
        ("a" * 64, "str"),
        ([True] * 64, "bool"),
        ([None] * 64, "NoneType"),
        (range(16 * 65_537), "65537 chunks"),
    ],
)
def test_tokens_that_are_none(tokens: Any, why: str, algorithm: HashAlgorithm) -> None:
    """Strings and fractions had keys, arrays an error of the encoder."""
    with pytest.raises(KeysInvalid, match=why):
        block_keys(_SPACE, tokens, algorithm)


@pytest.mark.parametrize("token", [-1, 1 << 32, 1 << 70])
def test_tokens_that_do_not_fit_32_bits(token: int) -> None:
    """CBOR has numbers of any size; BLAKE3 keys are of words."""
    with pytest.raises(KeysInvalid, match="from 0 up to 4294967295"):
        block_keys(_SPACE, [token] * 64, HashAlgorithm.BLAKE3)
    assert len(block_keys(_SPACE, [token] * 64)) == 4


async def test_memory_that_is_none() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        for memory in (b"abc", "abc", [1, 2], np.zeros(0, np.uint8), None):
            with pytest.raises(InvalidRequest, match="an array or tensor of a byte or more"):
                client.register(memory)
        client.register(np.array(3.0)).close()


async def test_a_list_of_keys() -> None:
    """The client sends no request: absent listens at the address."""
    async with AsyncClient("127.0.0.1:1") as client:
        for call in (
            client.lookup(_SPACE, _KEYS),
            client.evict(_SPACE, _KEYS),
            client.demote(_SPACE, _KEYS),
            client.retain(_SPACE, _KEYS, 1.0),
            client.end_retention(_SPACE, _KEYS),
            client.prefetch(_SPACE, _KEYS),
            client.assign(_SPACE, _KEYS, 32, []),
        ):
            with pytest.raises(KeysInvalid, match="a list; ChunkKeys are wanted"):
                await call


async def test_a_format_in_place_of_a_rendering() -> None:
    form: Any = "webp"
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest, match="a Rendering is wanted"):
            await ImageClient(client).get("cat", form)


async def test_a_picture_in_place_of_a_latent() -> None:
    absent: Any = None
    picture: Any = b"\x89PNG"
    async with AsyncClient("127.0.0.1:1") as client:
        images = ImageClient(client)
        with pytest.raises(InvalidRequest, match=r"Pictures are put by HTTP"):
            await images.put("cat", picture, absent)
        records: list[Any] = [absent, np.zeros(3), "text"]
        for record in records:
            with pytest.raises(InvalidRequest, match="the bytes of a record"):
                await images.put_record("cat", record)
