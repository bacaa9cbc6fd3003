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
