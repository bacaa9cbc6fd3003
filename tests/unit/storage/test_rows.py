"""Columns of facts by row, compared with dictionaries and lists."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_storage.core import rows as rows_module
from quire_storage.core.eviction import LeafArc
from quire_storage.core.namespaces import ChunkFacts, Group, NamespaceBook
from quire_storage.core.rows import NO_ROW, KeyNumbers, KeyRows, RowLists

_NAMES = st.integers(0, 30)


def _key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@given(st.lists(st.tuples(st.booleans(), _NAMES), max_size=200))
def test_a_key_has_its_row_until_the_last_use_ends(steps: list[tuple[bool, int]]) -> None:
    rows, uses, row_of = KeyRows(), Counter[int](), dict[int, int]()
    for begins, name in steps:
        if begins:
            row = rows.use(_key(name))
            assert row_of.setdefault(name, row) == row != NO_ROW
            uses[name] += 1
        elif uses[name]:
            rows.end_use(row_of[name])
            uses[name] -= 1
            if not uses[name]:
                del row_of[name]
        assert {name: rows.find(_key(name)) for name in row_of} == row_of
        assert len(set(row_of.values())) == len(row_of), "each has its own"
        assert all(rows.key(row) == _key(name) for name, row in row_of.items())
        assert all(rows.find(_key(name)) == NO_ROW for name in range(31) if name not in row_of)


def test_rows_are_given_again() -> None:
    rows = KeyRows()
    for number in range(3 * rows_module._BLOCK_ROWS):
        rows.end_use(rows.use(_key(number)))
    assert rows.use(_key(0)) == 1 and len(rows._blocks) == 1


def test_keys_are_of_one_length() -> None:
    rows = KeyRows()
    rows.use(b"ab")
    with pytest.raises(AssertionError, match="one length"):
        rows.use(b"abc")


@given(st.lists(st.tuples(st.sampled_from(["put", "remove"]), _NAMES, st.integers(0, 1 << 62)), max_size=100))
def test_numbers_are_those_that_were_put(steps: list[tuple[str, int, int]]) -> None:
    numbers, model = KeyNumbers(), dict[bytes, int]()
    for step, name, number in steps:
        if step == "put":
            numbers.put(_key(name), number)
            model[_key(name)] = number
        elif _key(name) in model:
            numbers.remove(_key(name))
            del model[_key(name)]
        assert sorted(numbers) == sorted(model) and len(numbers) == len(model)
        assert all(numbers.get(_key(name)) == model.get(_key(name)) for name in range(31))
        assert all((_key(name) in numbers) == (_key(name) in model) for name in range(31))


_MOVES = st.tuples(st.sampled_from(["first", "last", "take", "move"]), st.integers(1, 40), st.integers(1, 3))


@given(st.lists(_MOVES, max_size=200))
def test_lists_keep_their_order(steps: list[tuple[str, int, int]]) -> None:
    lists = RowLists()
    model: dict[int, list[int]] = {lists.new_list(): [] for _ in range(3)}
    for step, row, number in steps:
        source = next((name for name, rows in model.items() if row in rows), 0)
        assert lists.list_of(row) == source
        if step == "move" and source:
            moving = [row, *model[number][:2], row]
            lists.move_last(number, moving)
            for moving_row in moving:
                for rows in model.values():
                    if moving_row in rows:
                        rows.remove(moving_row)
                model[number].append(moving_row)
            assert [list(lists.rows(name)) for name in model] == list(model.values())
            continue
        assert lists.take(row) == source
        if source:
            model[source].remove(row)
        if step == "first":
            lists.put_first(number, row)
            model[number].insert(0, row)
        elif step == "last":
            lists.put_last(number, row)
            model[number].append(row)
        for name, rows in model.items():
            assert list(lists.rows(name)) == rows and lists.count(name) == len(rows)
            assert lists.first(name) == (rows[0] if rows else NO_ROW)


def test_a_list_that_has_ended_is_given_again() -> None:
    lists = RowLists()
    empty, filled = lists.new_list(), lists.new_list()
    lists.put_last(filled, 7)
    with pytest.raises(AssertionError, match="empty"):
        lists.end_list(filled)
    lists.end_list(empty)
    assert lists.new_list() == empty and list(lists.rows(empty)) == []


def test_chunks_are_no_objects_for_the_garbage_collector() -> None:
    """A collection looks at every object that may refer to others: with one for each chunk a node would stand still."""
    pool, order, book = KeyNumbers(), LeafArc(1 << 40), NamespaceBook()
    book.follow([Group([bytes(16)])])
    keys = [_key(number) for number in range(20_000)]
    gc.collect()
    objects = len(gc.get_objects())
    for number, key in enumerate(keys):
        parent = keys[number - 1] if number % 100 else b""
        pool.put(key, number)
        order.insert(key, parent, 1)
        book.add([ChunkFacts(key, parent, bytes(16), 1, number)], lambda _: True)
    gc.collect()
    assert len(gc.get_objects()) - objects < 200
