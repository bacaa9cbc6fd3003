"""The queue of chunks to register again, compared with a list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire_storage.cluster.unlisted import UnlistedChunks


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=50))
def test_chunks_come_in_the_order_in_which_they_were_queued(steps: list[tuple[bool, int]]) -> None:
    queue, model, last = UnlistedChunks(), list[tuple[bytes, int]](), 0
    for adds, count in steps:
        if adds:
            new = [(number.to_bytes(32, "big"), number) for number in range(last, last + count)]
            last += count
            queue.add([key for key, _ in new], [generation for _, generation in new])
            model += new
        else:
            assert queue.take(count) == model[:count]
            del model[:count]
        assert len(queue) == len(model) and bool(queue) == bool(model)
    queue.clear()
    assert not queue and queue.take(3) == []
