"""Chunk keys of a prefix, kept packed: 4,096 keys are one bytes object and not 4,096."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from quire.model.errors import InvalidRequest, KeysInvalid

KEY_BYTES: Final = 32
KEYS_MAX: Final = 65_536
BUCKET_CHUNKS: Final = 256
"""Chunks of a chain that share one index entry in Redis and, as a rule, one storage node."""


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    r"""Keys H_0 … H_{N-1} of a prefix, in order, concatenated. Raises `KeysInvalid`.

    >>> keys = ChunkKeys(bytes(32) + b"\x01" * 32)
    >>> len(keys), keys.run(1, 1).packed == keys.at(1)
    (2, True)
    """

    packed: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.packed, bytes):
            raise KeysInvalid(
                f"a {type(self.packed).__name__}; keys are one bytes object, as of b''.join", field="chunk_keys"
            )
        if len(self.packed) % KEY_BYTES:
            raise KeysInvalid(f"{len(self.packed)} bytes are no multiple of {KEY_BYTES}", field="chunk_keys")
        if len(self) > KEYS_MAX:
            raise KeysInvalid(f"{len(self)} keys in one request, {KEYS_MAX} at most", field="chunk_keys")

    def __len__(self) -> int:
        return len(self.packed) // KEY_BYTES

    def __iter__(self) -> Iterator[bytes]:
        return (self.packed[at : at + KEY_BYTES] for at in range(0, len(self.packed), KEY_BYTES))

    def at(self, index: int) -> bytes:
        """Key of chunk `index`."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.packed[index * KEY_BYTES : (index + 1) * KEY_BYTES]

    def run(self, first: int, count: int) -> ChunkKeys:
        """Keys of chunks first … first+count-1."""
        if first < 0 or count < 0 or first + count > len(self):
            raise KeysInvalid(f"[{first}, {first + count}) is not within {len(self)} keys", field="chunk_keys")
        return ChunkKeys(self.packed[first * KEY_BYTES : (first + count) * KEY_BYTES])

    def count_from(self, first_chunk: int) -> int:
        """Return the number of keys from one on.

        Raises:
            InvalidRequest: No key is left.
        """
        if not 0 <= first_chunk < len(self):
            message = f"first_chunk is {first_chunk}, but only {len(self)} keys were given"
            raise InvalidRequest(message, field="first_chunk")
        return len(self) - first_chunk

    def pick(self, indexes: Iterable[int]) -> ChunkKeys:
        """Return the keys of some chunks."""
        return ChunkKeys(b"".join(self.at(index) for index in indexes))

    def distinct(self) -> ChunkKeys:
        """These keys. Raises `KeysInvalid` where one appears twice, which no request may contain."""
        words = np.sort(np.frombuffer(self.packed, dtype="<u8")[:: KEY_BYTES // 8])
        if bool((words[1:] == words[:-1]).any()) and len(set(self)) < len(self):
            raise KeysInvalid("a key appears twice", field="chunk_keys")
        return self

    def digest(self) -> bytes:
        """Digest over all of them."""
        return hashlib.sha256(self.packed).digest()

    def bucket_of(self, index: int) -> bytes:
        """The key that opens the index bucket of chunk `index`."""
        return self.at(index - index % BUCKET_CHUNKS)

    def buckets_of(self, first: int, stop: int) -> bytes:
        """Return the keys that open the index buckets of chunks first … stop-1, one for each, concatenated."""
        starts = [first, *range((first // BUCKET_CHUNKS + 1) * BUCKET_CHUNKS, stop, BUCKET_CHUNKS)]
        return b"".join(self.bucket_of(at) * (end - at) for at, end in zip(starts, [*starts[1:], stop], strict=True))

    @property
    def whole_buckets(self) -> tuple[int, int]:
        """First and stop of the index buckets whose keys are all here."""
        return 0, -(-len(self) // BUCKET_CHUNKS)

    def sample(self, whole_bucket: int) -> KeySample:
        """Return the sample with all keys of one bucket."""
        packed, bucket_bytes, parts = self.packed, BUCKET_CHUNKS * KEY_BYTES, list[bytes]()
        for number, start in enumerate(range(0, len(packed), bucket_bytes)):
            stop = min(start + bucket_bytes, len(packed))
            if number == whole_bucket or stop - start <= 2 * KEY_BYTES:
                parts.append(packed[start:stop])
            else:
                parts += [packed[start : start + KEY_BYTES], packed[stop - KEY_BYTES : stop]]
        return KeySample(len(self), whole_bucket, b"".join(parts))


@dataclass(frozen=True, slots=True)
class KeySample:
    """A sample of the keys of a prefix: the first and the last one of each index bucket, and all of one bucket.

    Enough to look the prefix up if each key commits to all before it, as block keys do: the index is closed under
    prefixes, so a bucket whose last chunk is indexed is indexed as far as the prefix goes. Raises `KeysInvalid`.

    Attributes:
        count: Number of keys of the prefix.
        whole_bucket: Number of the bucket whose keys are all in the sample; a number behind the last bucket for none.
        packed: The keys of the sample in order, concatenated.
    """

    count: int
    whole_bucket: int
    packed: bytes

    def __post_init__(self) -> None:
        if not 0 < self.count <= KEYS_MAX:
            raise KeysInvalid(f"a sample of {self.count} keys, 1 to {KEYS_MAX} are allowed", field="sample.count")
        last = (self.count - 1) // BUCKET_CHUNKS
        expected = (self._start(last) + self._kept(last)) * KEY_BYTES
        if len(self.packed) != expected:
            message = f"{len(self.packed)} bytes, a sample of {self.count} keys has {expected}"
            raise KeysInvalid(message, field="sample.keys")

    def __len__(self) -> int:
        return self.count

    def has(self, index: int) -> bool:
        """Return whether the key of chunk `index` is in the sample."""
        bucket, at = divmod(index, BUCKET_CHUNKS)
        return 0 <= index < self.count and (bucket == self.whole_bucket or at in (0, self._size(bucket) - 1))

    def at(self, index: int) -> bytes:
        """Key of chunk `index`, which the sample `has`."""
        if not self.has(index):
            raise IndexError(index)
        bucket, at = divmod(index, BUCKET_CHUNKS)
        start = (self._start(bucket) + (at if bucket == self.whole_bucket else min(at, 1))) * KEY_BYTES
        return self.packed[start : start + KEY_BYTES]

    def run(self, first: int, count: int) -> KeySample:
        """Return the sample of the first `count` keys; it has to have the last one of them. `first` is 0."""
        if first or not self.has(count - 1):
            raise KeysInvalid(f"[{first}, {first + count}) is not within the sample", field="sample")
        bucket, at = divmod(count - 1, BUCKET_CHUNKS)
        stop = self._start(bucket) + (at if bucket == self.whole_bucket else min(at, 1)) + 1
        return KeySample(count, self.whole_bucket, self.packed[: stop * KEY_BYTES])

    def bucket_of(self, index: int) -> bytes:
        """The key that opens the index bucket of chunk `index`."""
        return self.at(index - index % BUCKET_CHUNKS)

    @property
    def whole_buckets(self) -> tuple[int, int]:
        """First and stop of the index buckets whose keys are all here, besides buckets of two and less."""
        return self.whole_bucket, self.whole_bucket + 1

    def distinct(self) -> KeySample:
        """Return the sample. Raises `KeysInvalid` where a key appears twice."""
        ChunkKeys(self.packed).distinct()
        return self

    def _size(self, bucket: int) -> int:
        """Return how many chunks of the prefix a bucket has."""
        return min(BUCKET_CHUNKS, self.count - bucket * BUCKET_CHUNKS)

    def _kept(self, bucket: int) -> int:
        """Return how many keys of a bucket are in the sample."""
        return self._size(bucket) if bucket == self.whole_bucket else min(2, self._size(bucket))

    def _start(self, bucket: int) -> int:
        """Return the number of keys of the sample before a bucket's. All buckets but the last one are full."""
        return 2 * bucket + (BUCKET_CHUNKS - 2 if bucket > self.whole_bucket else 0)


def check_keys(keys: object) -> None:
    """Refuse anything but `ChunkKeys`. Raises `KeysInvalid`, with what makes them."""
    if not isinstance(keys, ChunkKeys):
        raise KeysInvalid(
            f"a {type(keys).__name__}; ChunkKeys are wanted, as `block_keys` makes them, or ChunkKeys(b''.join(keys))",
            field="chunk_keys",
        )


def packed(keys: ChunkKeys) -> bytes:
    """Return the keys, concatenated. Raises `KeysInvalid` as `check_keys`."""
    check_keys(keys)
    return keys.packed
