"""Keys are fixed by their definition: known answers, chains, namespaces."""

from __future__ import annotations

import hashlib

import blake3
import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.model.errors import InvalidRequest, KeysInvalid
from quire.model.hashing import HashAlgorithm, Namespace, block_keys, engine_keys, sha256_cbor
from quire.model.keys import KEYS_MAX, ChunkKeys
from quire.model.layout import Dtype, KvLayout

LAYOUT = KvLayout(32, 16, 8, 128, Dtype.BF16)
NAMESPACE = Namespace("llama", "w1", LAYOUT)


def test_sha256_cbor_known_answer() -> None:
    """SHA-256 over canonical CBOR: 83 40 82 01 02 f6 are the bytes of (b"", (1, 2), None) by RFC 8949."""
    assert sha256_cbor((b"", (1, 2), None)) == hashlib.sha256(bytes.fromhex("8340820102f6")).digest()


def test_namespace_digest_known_answer() -> None:
    """The digest is a contract with every stored chunk: it must not change unnoticed."""
    assert NAMESPACE.digest().hex() == "02ce1f9e2dfc925e8e945ae7f91157c624d30fbcafefa614c7b02ddb105d622f"
    assert (
        block_keys(NAMESPACE, list(range(32))).at(1).hex()
        == "f5659e809c47f239f0fc7fcb6e6ad6eeaa718697e3ab3cca8412c04d25998369"
    )
    assert (
        block_keys(NAMESPACE, list(range(32)), HashAlgorithm.BLAKE3).at(1).hex()
        == "8fe5f2ec8cdb822491984a2c98a7a8b1adba8b3e820972d7edd2ff69d6adc396"
    )


def test_chain_by_definition() -> None:
    """H_i = Hash(H_{i-1} ‖ tokens_i), computed here by hand for both algorithms."""
    tokens = list(range(1000, 1048))
    for algorithm in HashAlgorithm:
        parent = hashlib.sha256(NAMESPACE.digest() + algorithm.value.encode()).digest()
        keys = block_keys(NAMESPACE, tokens, algorithm)
        for index in range(3):
            part = tokens[index * 16 : index * 16 + 16]
            if algorithm is HashAlgorithm.BLAKE3:
                words = b"".join(token.to_bytes(4, "little") for token in part)
                parent = blake3.blake3(parent + words).digest()
            else:
                parent = hashlib.sha256(cbor2.dumps((parent, tuple(part), None), canonical=True)).digest()
            assert keys.at(index) == parent


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=80), st.integers(0, 79))
def test_keys_agree_exactly_as_far_as_tokens_do(tokens: list[int], position: int) -> None:
    """Two prompts share keys up to the chunk in which they differ, and none after it."""
    position %= len(tokens)
    other = [*tokens[:position], tokens[position] + 1, *tokens[position + 1 :]]
    first, second = list(block_keys(NAMESPACE, tokens)), list(block_keys(NAMESPACE, other))
    same = position // 16
    assert first[:same] == second[:same]
    assert not set(first[same:]) & set(second[same:])


@pytest.mark.parametrize(
    "other",
    [
        Namespace("llama2", "w1", LAYOUT),
        Namespace("llama", "w2", LAYOUT),
        Namespace("llama", "w1", LAYOUT, adapter="lora"),
        Namespace("llama", "w1", LAYOUT, tenant_salt=b"t"),
        Namespace("llama", "w1", LAYOUT, shard_index=1, shard_count=2),
        Namespace("llama", "w1", KvLayout(32, 16, 8, 128, Dtype.FP16)),
    ],
)
def test_nothing_is_shared_between_namespaces(other: Namespace) -> None:
    tokens = list(range(64))
    assert not set(block_keys(NAMESPACE, tokens)) & set(block_keys(other, tokens))
    digests = ChunkKeys(bytes(64))
    assert engine_keys(NAMESPACE, digests).packed != engine_keys(other, digests).packed


def test_bad_input_names_its_field() -> None:
    with pytest.raises(KeysInvalid, match="chunk_keys"):
        ChunkKeys(b"x" * 33)
    with pytest.raises(KeysInvalid, match="at most"):
        ChunkKeys(bytes(32 * (KEYS_MAX + 1)))
    with pytest.raises(InvalidRequest, match=r"namespace\.model_id"):
        Namespace("", "w", LAYOUT)
    with pytest.raises(InvalidRequest, match="shard_index"):
        Namespace("m", "w", LAYOUT, shard_index=2, shard_count=2)
    with pytest.raises(InvalidRequest, match="tenant_salt"):
        Namespace("m", "w", LAYOUT, tenant_salt=bytes(65))
