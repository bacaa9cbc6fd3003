"""Records of chunks as columns equal a list with a record for each chunk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.model.errors import InvalidRequest
from quire.model.keys import BUCKET_CHUNKS, ChunkKeys
from quire.model.records import NO_PARENT, ChunkRecord, ChunkRecords, records

_KEYS = ChunkKeys(b"".join(number.to_bytes(32, "big") for number in range(1, 3 * BUCKET_CHUNKS)))
_TAG = b"n" * 16
_digests = st.binary(min_size=32, max_size=32).filter(any)
_tags = st.binary(min_size=16, max_size=16)
_rows = st.lists(
    st.builds(ChunkRecord, _digests, st.just(b""), _digests, st.just(b""), _tags)
    | st.builds(ChunkRecord, _digests, _digests, st.sampled_from([b"b" * 32, b"c" * 32]), st.just(b"b" * 32), _tags)
)


def _one_by_one(first: int, count: int) -> list[ChunkRecord]:
    return [
        ChunkRecord(
            _KEYS.at(index),
            _KEYS.at(index - 1) if index else b"",
            _KEYS.bucket_of(index),
            _KEYS.bucket_of(index - 1) if index else b"",
            _TAG,
        )
        for index in range(first, first + count)
    ]


@given(st.integers(0, 2 * BUCKET_CHUNKS), st.integers(0, BUCKET_CHUNKS))
def test_a_chain_has_the_parents_and_buckets_of_its_chunks(first: int, count: int) -> None:
    chain = records(_KEYS, first, count, namespace=_TAG)
    assert list(chain) == _one_by_one(first, count)
    assert chain.namespace_list() == [_TAG] * count


@given(_rows)
def test_columns_and_single_records_say_the_same(rows: list[ChunkRecord]) -> None:
    columns = ChunkRecords.of(rows)
    assert ChunkRecords.of(columns) is columns
    assert list(columns) == rows and [record.namespace for record in columns] == [row.namespace for row in rows]
    assert columns.key_list() == [row.key for row in rows]
    assert columns.parent_list() == [row.parent or NO_PARENT for row in rows]
    assert columns.parent_mask().tolist() == [bool(row.parent) for row in rows]
    assert columns.link_mask().tolist() == [bool(row.parent) and row.parent_bucket != row.bucket for row in rows]


@given(_rows, st.data())
def test_parts_are_those_of_a_list(rows: list[ChunkRecord], data: st.DataObject) -> None:
    columns = ChunkRecords.of(rows)
    first, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(rows))] * 2)))
    assert list(columns[first:stop]) == rows[first:stop]
    assert list(columns[::-1]) == rows[::-1]
    assert [columns[at] for at in range(len(rows))] == rows
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))), dtype=bool)
    assert list(columns.pick(mask)) == [row for row, is_picked in zip(rows, mask, strict=True) if is_picked]
    assert ChunkRecords.joined([columns[:first], columns[first:]]) == columns


@given(_rows)
def test_runs_are_cut_where_the_bucket_changes(rows: list[ChunkRecord]) -> None:
    columns = ChunkRecords.of(rows)
    runs = columns.runs(columns.buckets)
    assert [at for first, stop in runs for at in range(first, stop)] == list(range(len(rows)))
    for first, stop in runs:
        assert len({row.bucket for row in rows[first:stop]}) == 1
    assert all(rows[stop - 1].bucket != rows[stop].bucket for _, stop in runs[:-1])


def test_a_tag_is_given_to_records_without_one() -> None:
    bare = records(_KEYS, 0, 2)
    assert bare.in_namespace(_TAG).namespace_list() == [_TAG] * 2
    assert bare.in_namespace(_TAG).in_namespace(b"m" * 16).namespace_list() == [_TAG] * 2


@pytest.mark.parametrize("at", range(5))
def test_columns_of_different_lengths_are_refused(at: int) -> None:
    chain = records(_KEYS, 0, 3)
    columns = [chain.keys, chain.parents, chain.buckets, chain.parent_buckets, chain.namespaces]
    columns[at] = columns[at][:-1]
    with pytest.raises(InvalidRequest, match="bytes: 32 for each key") as refusal:
        ChunkRecords(*columns)
    assert refusal.value.field == "records"
