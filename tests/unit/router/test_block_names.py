"""Names of a prompt's blocks, and blocks that an engine's events tell of."""

from __future__ import annotations

import hashlib
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.model.errors import InvalidRequest
from quire.model.hashing import Namespace
from quire.model.layout import Dtype, KvLayout
from quire_tools.router.block_names import BlockNaming
from quire_tools.router.known_blocks import KnownBlocks
from quire_tools.router.prompts import Prompt

SPACE = Namespace("model", "weights", KvLayout(2, 8, 1, 8, Dtype.FP16))
ANSWER: dict[str, Any] = {
    "quire_names": "digest",
    "quire_blocks": {"namespace": SPACE.to_record(), "hash_tokens": 4, "block_tokens": 8, "parent": "07" * 32},
}


def test_keys_are_those_of_the_engine() -> None:
    """Two of vLLM's hashes a chunk; the salt is in the first."""
    naming = BlockNaming.of(ANSWER, b"salt of the tenant")
    assert naming is not None and naming.namespace.tenant_salt == b"salt of the tenant"
    tokens, parent, ends = list(range(30, 60)), bytes.fromhex("07" * 32), []
    for number in range(7):
        extra = [["cache_salt", "pepper"]] if number == 0 else None
        value = [parent, tokens[4 * number : 4 * number + 4], extra]
        parent = hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()
        ends.append(parent)
    root = naming.namespace.digest()
    expected = [hashlib.sha256(root + end).digest() for end in ends[1::2]]
    keys = naming.keys(tokens, "pepper")
    assert [keys.at(number) for number in range(len(keys))] == expected
    assert naming.keys(tokens, "").at(0) != expected[0]


@pytest.mark.parametrize("answer", [{}, {"quire_blocks": None}, {"quire_blocks": [1]}])
def test_engines_without_a_description(answer: dict[str, Any]) -> None:
    assert BlockNaming.of(answer, b"") is None


@pytest.mark.parametrize(
    "change",
    [{"namespace": 3}, {"hash_tokens": "many"}, {"hash_tokens": 0}, {"hash_tokens": 3}, {"parent": "xyz"}],
)
def test_descriptions_that_are_not_understood(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        BlockNaming.of({"quire_blocks": {**ANSWER["quire_blocks"], **change}}, b"")


def stored(hashes: list[int], parent: int | None, tokens: list[Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": 4,
        "medium": "GPU",
        **more,
    }


def removed(hashes: list[int], **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", **more}


def known(*events: Any) -> KnownBlocks:
    blocks = KnownBlocks()
    for number, event in enumerate(events):
        blocks.receive(number, [0.0, [event]])
    return blocks


def cached(blocks: KnownBlocks, tokens: list[int], adapter: str = "", cache_salt: str = "") -> int:
    prompt = Prompt(tokens=tokens, length=len(tokens), adapter=adapter, cache_salt=cache_salt)
    counts = {blocks.cached_tokens(prompt.digests) for _ in range(2)}  # as for two engines
    (count,) = counts
    return count


def test_blocks_are_found_by_their_tokens() -> None:
    tokens = list(range(12))
    blocks = known(stored([11, 12], None, tokens[:8]), stored([13], 12, tokens[8:]))
    assert [cached(blocks, tokens[:count]) for count in (3, 4, 7, 8, 12)] == [0, 4, 4, 8, 12]
    assert cached(blocks, [*tokens, 99]) == 12 and cached(blocks, [99, *tokens]) == 0
    assert cached(blocks, tokens, adapter="lora") == cached(blocks, tokens, cache_salt="salt") == 0


def test_removed_blocks_are_gone_and_others_stay() -> None:
    tokens = list(range(8))
    events = stored([11, 12], None, tokens), removed([12])
    assert cached(known(*events), tokens) == 4
    assert cached(known(*events, {"type": "AllBlocksCleared"}), tokens) == 0
    assert cached(known(*events, removed([77]), removed([11])), tokens) == 0


def test_adapters_and_salts_have_blocks_of_their_own() -> None:
    tokens = list(range(8))
    blocks = known(stored([1, 2], None, tokens, lora_name="lora", extra_keys=[["lora", "salt"], ["lora"]]))
    assert cached(blocks, tokens, adapter="lora", cache_salt="salt") == 8
    assert cached(blocks, tokens, adapter="lora") == cached(blocks, tokens) == 0
    assert cached(known(stored([1], None, tokens[:4], lora_name="lora")), tokens, adapter="lora") == 4


def test_what_is_elsewhere_does_not_count() -> None:
    tokens = list(range(4))
    assert cached(known(stored([1], None, tokens, medium="STORAGE")), tokens) == 0
    assert cached(known(stored([1], None, tokens, kv_cache_spec_kind="sliding_window")), tokens) == 0
    assert cached(known(stored([1], None, tokens), removed([1], medium="CPU")), tokens) == 4


def test_two_groups_hold_a_block() -> None:
    tokens = list(range(4))
    events = stored([1], None, tokens, group_idx=0), stored([1], None, tokens, group_idx=1)
    assert cached(known(*events, removed([1], group_idx=0)), tokens) == 4
    assert cached(known(*events, removed([1], group_idx=0), removed([1], group_idx=1)), tokens) == 0


def test_older_engines_send_arrays() -> None:
    tokens = list(range(4))
    blocks = known(["BlockStored", [b"one"], None, tokens, 4, None])
    assert cached(blocks, tokens) == 4
    blocks.receive(1, [0.0, [["BlockRemoved", [b"one"]]]])
    assert cached(blocks, tokens) == 0 and len(blocks) == 0


def test_lost_events_cost_knowledge_never_wrong_knowledge() -> None:
    tokens = list(range(8))
    blocks = known(stored([1], None, tokens[:4]))
    blocks.receive(2, [0.0, [stored([2], 1, tokens[4:])]])  # the second one may have removed block 1
    assert cached(blocks, tokens) == 0
    blocks.receive(3, [0.0, [stored([1, 2], None, tokens)]])
    assert cached(blocks, tokens) == 8


@pytest.mark.parametrize(
    "event",
    [
        {},
        [],
        {"type": "BlockStored"},
        stored([1], None, [1, 2, 3]),
        stored([1], None, ["a"] * 4),
        stored([1], None, [1, 2, 3, 4], block_size=0),
        stored([1], None, [-1, 2, 3, 4]),
    ],
)
def test_events_that_are_not_understood_cost_knowledge(event: Any) -> None:
    blocks = known(stored([9], None, list(range(4))), event)
    assert len(blocks) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_what_is_known_is_what_was_stored_and_not_removed(steps: list[tuple[bool, int]]) -> None:
    """A model: a chain of six blocks, of which any may leave. What is held is a set of hashes."""
    blocks, tokens, held, digests = KnownBlocks(), list(range(24)), set[int](), set[int]()
    for number, (adds, at) in enumerate(steps):
        if adds:
            blocks.receive(number, [0.0, [stored([at], at - 1 if at else None, tokens[4 * at : 4 * at + 4])]])
            if at == 0 or at - 1 in digests:
                held.add(at)
                digests.add(at)
        else:
            blocks.receive(number, [0.0, [removed([at])]])
            held.discard(at)
            digests.discard(at)
        prefix = next((count for count in range(7) if count not in held), 6)
        assert cached(blocks, tokens) == 4 * prefix
