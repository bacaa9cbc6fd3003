"""The format of the prefix index in Redis. Each script (`lua/index_*.lua`) changes the index buckets of one hash slot.

The index knows a chunk by its fingerprint, 8 bytes of its key. An index bucket has pages of up to 256 chunks: "n"
(2 bytes), n fingerprints in the order in which they were indexed, then, packed by cmsgpack, their facts:

- spans: (row, generation, holders)…: from that row on entries have this generation (8 bytes), and are held by the nodes
  with these names, joined by commas ("" for none, which keeps the chain closed while others extend it);
- links: (row, parent, bucket)…: of rows whose parent is not the row before: its fingerprint ("" for none); where it is
  in another bucket, the fingerprint of that bucket and the name of the link;
- extra: (row, count)…: how many indexed chunks extend a row, beside the next one where that has no link;
- of the first page besides: chunks of the bucket, slots of its directory, and the number of its last page.

So a chain that was stored at once takes 8 bytes a chunk. A bucket of several pages has a directory: hashes of about 64
fields (5 bytes of a fingerprint → page) for the chunks that are not in its first page; they split one by one as it
grows (linear hashing).

Beside them, in the same slot, lie a hash of pins (fingerprint .. lease id → expiry; "@p": when to look for expired
ones), a hash of objects that nothing lists any more (key → when to delete it, or "!" and until when its deletion runs),
a hash that counts what each node is listed for (node → count:digest), for each node a hash of what it is to drop
(fingerprint → generation of the entry that ended, key, bucket), of each bucket a hash of links to children in other
buckets (fingerprints of parent and child .. name of the link → when it was made), a hash of copies that nodes keep and
hide, because they cannot read them now (fingerprint → names of the nodes, and of each the generation of the entry that
listed it), and the objects that are due, by when.

A link is made before its child is registered, and removed by its name after the child's entry has ended. Both calls may
come twice. Each registration makes a link of its own, and removes it if the child is there by another one: a link that
two registrations shared would be removed with the entry of the first, and leave that of the second without. If a
removal never comes, the link keeps the parent until `PrefixIndex.repair` finds that no child has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from quire.model.fingerprints import PRINT_BYTES, fingerprints
from quire.model.index import Match, Pin, PlacedRun
from quire.model.keys import BUCKET_CHUNKS, ChunkKeys, KeySample

_PRUNE_MS: Final = 10_000


def pin_arguments(pin: Pin) -> list[Any]:
    """Return the arguments of `match` and `pin`."""
    return [pin.lease_id, pin.expires_ms, pin.ttl_ms, pin.now_ms, pin.now_ms + _PRUNE_MS]


def bucket_parts(keys: ChunkKeys | KeySample) -> Iterator[tuple[bytes, int, bool]]:
    """Yield for each bucket the fingerprints of a prefix, how many chunks it has of it, and whether that is all."""
    prints, at = fingerprints(keys.packed), 0
    first, stop = keys.whole_buckets
    for number in range(-(-len(keys) // BUCKET_CHUNKS)):
        size, is_whole = min(BUCKET_CHUNKS, len(keys) - number * BUCKET_CHUNKS), first <= number < stop
        end = at + (size if is_whole else min(2, size)) * PRINT_BYTES
        yield prints[at:end], size, is_whole
        at = end


def runs_of(flat: Sequence[Any]) -> Match:
    """Convert the answer of `match`; neighbours of one placement form one run."""
    state = int(flat[0])
    runs: list[PlacedRun] = []
    for count, placement in zip(flat[1::2], flat[2::2], strict=True):
        nodes = nodes_of(placement)
        if runs and runs[-1].nodes == nodes:
            count += runs.pop().count
        runs.append(PlacedRun(count, nodes))
    return Match(tuple(runs), state == 1, -state - 1 if state < 0 else None)


def nodes_of(placement: bytes) -> tuple[str, ...]:
    """Return the nodes that a placement names."""
    return tuple(placement.decode().split(",")) if placement else ()
