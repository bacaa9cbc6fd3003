"""Object names in `quire-kv`, and the translation of chunk objects between client keys and derived keys."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from quire.model.chunk_object import TRAILER, record_of, sound_header, with_record
from quire.model.errors import CorruptData
from quire.model.keys import KEY_BYTES, ChunkKeys
from quire.model.records import ChunkRecord

_NAME: Final = re.compile("([0-9a-f]{32})/([0-9a-f]{64})")
_TAG: Final = re.compile("([0-9a-f]{32})/.*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ChunkName:
    """`NAMESPACE/KEY` in hexadecimal: the first 16 bytes of the namespace's digest, and the client's key."""

    namespace: bytes
    key: bytes

    @classmethod
    def parse(cls, name: str) -> ChunkName | None:
        """Return the name; None if it is not a chunk's."""
        match = _NAME.fullmatch(name)
        return cls(bytes.fromhex(match[1]), bytes.fromhex(match[2])) if match else None

    def __str__(self) -> str:
        return f"{self.namespace.hex()}/{self.key.hex()}"


def namespace_of(prefix: str) -> bytes | None:
    """Return the namespace of all names with this prefix; None if the prefix is shorter than a namespace."""
    match = _TAG.fullmatch(prefix)
    return bytes.fromhex(match[1]) if match else None


async def translated(header: bytes, translate: Callable[[ChunkKeys], Awaitable[ChunkKeys]]) -> bytes:
    """Translate the keys in a chunk's header. Raises `CorruptData` if the header is damaged."""
    row = sound_header(header)
    if row is None:
        raise CorruptData("the header of the chunk is damaged")
    record = record_of(row)
    keys = await translate(ChunkKeys(record.key + record.bucket + record.parent + record.parent_bucket))
    parent = keys.run(2, 2).packed if record.parent else b""
    changed = ChunkRecord(keys.at(0), parent[:KEY_BYTES], keys.at(1), parent[KEY_BYTES:], record.namespace)
    return with_record(header, changed)


async def translated_tail(tail: bytes, translate: Callable[[ChunkKeys], Awaitable[ChunkKeys]]) -> bytes:
    """Translate the keys in the end of a chunk object, from its header on. Raises `CorruptData`."""
    end = len(tail) - TRAILER.size
    return await translated(tail[:end], translate) + tail[end:]
