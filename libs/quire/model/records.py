"""Records of chunks, as the prefix index keeps them: keys, parents and buckets. Records of many chunks are columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, overload

import numpy as np
import numpy.typing as npt

from quire.model.errors import InvalidRequest
from quire.model.keys import KEY_BYTES, ChunkKeys
from quire.model.policy import NAMESPACE_TAG_BYTES

NO_NAMESPACE: Final = bytes(NAMESPACE_TAG_BYTES)
NO_PARENT: Final = bytes(KEY_BYTES)
"""In the place of a parent, in a column: the chunk is the first of a prefix. Keys are hashes, and none is zeros."""
UNCHAINED_MAX: Final = 16_384
"""Keys of one request that are no prefix: each of them is looked up by itself."""


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A chunk's place in the index. `parent` and `parent_bucket` are empty for the first of a prefix.

    `namespace`: first 16 bytes of its namespace's digest, which cache events tell; zeros where it is not known.
    """

    key: bytes
    parent: bytes
    bucket: bytes
    parent_bucket: bytes
    namespace: bytes = field(default=NO_NAMESPACE, compare=False)


@dataclass(frozen=True, slots=True)
class ChunkRecords(Sequence[ChunkRecord]):
    """Records of N chunks, in order, as columns. A `ChunkRecord` is made at the moment it is needed.

    Attributes:
        keys: N keys of 32 bytes, concatenated.
        parents: Likewise, zeros for the first chunk of a prefix.
        buckets: Likewise.
        parent_buckets: Likewise, zeros for the first chunk of a prefix.
        namespaces: N tags of 16 bytes, concatenated.

    Raises:
        InvalidRequest: A column has another number of rows.
    """

    keys: bytes
    parents: bytes
    buckets: bytes
    parent_buckets: bytes
    namespaces: bytes = field(compare=False)

    def __post_init__(self) -> None:
        count, rest = divmod(len(self.keys), KEY_BYTES)
        sizes = len(self.parents), len(self.buckets), len(self.parent_buckets)
        if rest or any(size != len(self.keys) for size in sizes) or len(self.namespaces) != count * NAMESPACE_TAG_BYTES:
            raise InvalidRequest(
                f"columns of {len(self.keys)}, {', '.join(map(str, sizes))} and {len(self.namespaces)} bytes: "
                f"{KEY_BYTES} for each key, and {NAMESPACE_TAG_BYTES} for each namespace, are needed",
                field="records",
            )

    @classmethod
    def of(cls, chunks: Iterable[ChunkRecord]) -> ChunkRecords:
        """Return records as columns; those that are columns already unchanged."""
        if isinstance(chunks, ChunkRecords):
            return chunks
        rows = list(chunks)
        return cls(
            b"".join(row.key for row in rows),
            b"".join(row.parent or NO_PARENT for row in rows),
            b"".join(row.bucket for row in rows),
            b"".join(row.parent_bucket or NO_PARENT for row in rows),
            b"".join(row.namespace for row in rows),
        )

    @classmethod
    def joined(cls, parts: Sequence[ChunkRecords]) -> ChunkRecords:
        """Return the records of all parts."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            b"".join(part.keys for part in parts),
            b"".join(part.parents for part in parts),
            b"".join(part.buckets for part in parts),
            b"".join(part.parent_buckets for part in parts),
            b"".join(part.namespaces for part in parts),
        )

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES

    def __iter__(self) -> Iterator[ChunkRecord]:
        parents, above = _rows(self.parents, KEY_BYTES), _rows(self.parent_buckets, KEY_BYTES)
        columns = _rows(self.keys, KEY_BYTES), parents, _rows(self.buckets, KEY_BYTES), above
        for key, parent, bucket, parent_bucket, tag in zip(*columns, self.namespace_list(), strict=True):
            has_parent = parent != NO_PARENT
            yield ChunkRecord(key, parent if has_parent else b"", bucket, parent_bucket if has_parent else b"", tag)

    @overload
    def __getitem__(self, index: int) -> ChunkRecord: ...
    @overload
    def __getitem__(self, index: slice) -> ChunkRecords: ...
    def __getitem__(self, index: int | slice) -> ChunkRecord | ChunkRecords:
        if isinstance(index, slice):
            first, stop, step = index.indices(len(self))
            if step != 1:
                return self.pick(np.arange(first, stop, step))
            return self._cut(first, max(first, stop))
        at = range(len(self))[index]
        return next(iter(self._cut(at, at + 1)))

    def pick(self, rows: npt.NDArray[np.int64 | np.bool_]) -> ChunkRecords:
        """Return some of them. `rows`: their numbers, or a mask of all."""
        columns = self.keys, self.parents, self.buckets, self.parent_buckets
        keys, parents, buckets, above = (np.frombuffer(column, f"V{KEY_BYTES}")[rows].tobytes() for column in columns)
        tags = np.frombuffer(self.namespaces, f"V{NAMESPACE_TAG_BYTES}")[rows].tobytes()
        return ChunkRecords(keys, parents, buckets, above, tags)

    def key_list(self) -> list[bytes]:
        """Return the key of each."""
        return _rows(self.keys, KEY_BYTES)

    def parent_list(self) -> list[bytes]:
        """Return the key of each one's parent, `NO_PARENT` for none."""
        return _rows(self.parents, KEY_BYTES)

    def namespace_list(self) -> list[bytes]:
        """Return the namespace's tag of each."""
        return _rows(self.namespaces, NAMESPACE_TAG_BYTES)

    def in_namespace(self, tag: bytes) -> ChunkRecords:
        """Return the records with this tag, if none of them has one."""
        if tag == NO_NAMESPACE or self.namespaces.count(0) < len(self.namespaces):
            return self
        return ChunkRecords(self.keys, self.parents, self.buckets, self.parent_buckets, tag * len(self))

    def parent_mask(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the chunks that have a parent."""
        return np.asarray(_words(self.parents).any(axis=1))

    def link_mask(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the chunks that have their parent in another bucket."""
        return np.asarray(self.parent_mask() & (_words(self.parent_buckets) != _words(self.buckets)).any(axis=1))

    def runs(self, column: bytes) -> list[tuple[int, int]]:
        """Return first and stop of each run of chunks that have the same value in `column`, which is one of these."""
        if not self:
            return []
        words = np.frombuffer(column, "<u8").reshape(len(self), -1)
        cuts = (np.flatnonzero((words[1:] != words[:-1]).any(axis=1)) + 1).tolist()
        return list(zip([0, *cuts], [*cuts, len(self)], strict=True))

    def _cut(self, first: int, stop: int) -> ChunkRecords:
        start, end = first * KEY_BYTES, stop * KEY_BYTES
        return ChunkRecords(
            self.keys[start:end],
            self.parents[start:end],
            self.buckets[start:end],
            self.parent_buckets[start:end],
            self.namespaces[first * NAMESPACE_TAG_BYTES : stop * NAMESPACE_TAG_BYTES],
        )


def records(
    keys: ChunkKeys, first: int, count: int, *, unchained: bool = False, namespace: bytes = NO_NAMESPACE
) -> ChunkRecords:
    """Index records of chunks first … first+count-1 of a chain whose keys from the start are `keys`.

    `unchained`: of chunks without a parent, each in a bucket of its own. Raises `InvalidRequest` for too many.
    """
    own, tags, stop = keys.run(first, count).packed, namespace * count, first + count
    if unchained or not count:
        if count > UNCHAINED_MAX:
            raise InvalidRequest(f"{count} unchained keys, {UNCHAINED_MAX} at most", field="chunk_keys")
        return ChunkRecords(own, NO_PARENT * count, own, NO_PARENT * count, tags)
    above, no_parent = max(0, first - 1), b"" if first else NO_PARENT
    parents = no_parent + keys.run(above, stop - 1 - above).packed
    return ChunkRecords(own, parents, keys.buckets_of(first, stop), no_parent + keys.buckets_of(above, stop - 1), tags)


def check_unchained(keys: ChunkKeys) -> None:
    """Check the number of unchained keys. Raises `InvalidRequest` for too many."""
    if len(keys) > UNCHAINED_MAX:
        raise InvalidRequest(f"{len(keys)} unchained keys, {UNCHAINED_MAX} at most", field="chunk_keys")


def _rows(column: bytes, size: int) -> list[bytes]:
    return [column[at : at + size] for at in range(0, len(column), size)]


def _words(column: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(column, "<u8").reshape(-1, KEY_BYTES // 8)
