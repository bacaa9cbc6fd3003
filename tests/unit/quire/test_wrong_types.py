"""Values of another type are refused with the expected type, and not by an AttributeError."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.client import AsyncClient, ImageClient
from quire.model.durability import Durability
from quire.model.errors import InvalidRequest, KeysInvalid, LayoutInvalid
from quire.model.fitting import Fit
from quire.model.hashing import HashAlgorithm, Namespace, block_keys
from quire.model.images import Rendering
from quire.model.keys import ChunkKeys
from quire.model.layout import Attention, Dtype, KvLayout
from quire.wire import convert

_LAYOUT = KvLayout(2, 16, 2, 64, Dtype.FP16)
_SPACE = Namespace("m", "1", _LAYOUT)
_KEYS: Any = [bytes(32), bytes([1]) * 32]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ("fp16", Dtype.FP16),
        ("float16", Dtype.FP16),
        (torch.float16, Dtype.FP16),
        (np.dtype(np.float16), Dtype.FP16),
        ("BF16", Dtype.BF16),
        (torch.bfloat16, Dtype.BF16),
        (torch.float8_e4m3fn, Dtype.FP8_E4M3),
    ],
)
def test_element_types_by_name(value: Any, dtype: Dtype) -> None:
    assert KvLayout(2, 16, 2, 64, value) == KvLayout(2, 16, 2, 64, dtype)


def test_strings_in_place_of_members() -> None:
    assert KvLayout(2, 16, 1, 64, "fp16", "mla").attention is Attention.MLA
    with pytest.raises(LayoutInvalid, match=r"'int8'; there are 'fp32', 'fp16'"):
        KvLayout(2, 16, 2, 64, "int8")
    with pytest.raises(LayoutInvalid, match=r"'gqa'; there are 'kv_heads', 'mla'"):
        KvLayout(2, 16, 2, 64, Dtype.FP16, "gqa")
    fit: Any = "cover"
    assert Rendering("webp", fit=fit).fit is Fit.COVER
    fit = "squash"
    with pytest.raises(InvalidRequest, match=r"'squash'; there are 'contain', 'cover'"):
        Rendering("webp", fit=fit)
    assert convert.durability_to("object") == convert.durability_to(Durability.OBJECT)
    with pytest.raises(InvalidRequest, match=r"'disk'; there are 'memory', 'local', 'replicated', 'object'"):
        convert.durability_to("disk")


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


async def test_a_rendering_that_is_none() -> None:
    width: Any = 512
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest, match="a Rendering, or a format as 'webp', is wanted"):
            await ImageClient(client).get("cat", width)
        with pytest.raises(InvalidRequest, match="'bmp'; there are png"):
            await ImageClient(client).get("cat", "bmp")


async def test_a_picture_in_place_of_a_latent() -> None:
    absent: Any = None
    picture: Any = b"\x89PNG"
    async with AsyncClient("127.0.0.1:1") as client:
        images = ImageClient(client)
        with pytest.raises(InvalidRequest, match="put_picture takes pictures"):
            await images.put("cat", picture, absent)
        records: list[Any] = [absent, np.zeros(3), "text"]
        for record in records:
            with pytest.raises(InvalidRequest, match="the bytes of a record"):
                await images.put_record("cat", record)
