"""Listings of `quire-kv`: each chunk of a namespace once, with a bounded number of objects looked at in a request."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import pytest

from quire.model.keys import ChunkKeys
from quire.model.records import ChunkRecord
from quire_gateway.access.key_derivation import DerivedKeys
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.ports import ChunkAttributes
from quire_gateway.s3 import reserved
from quire_gateway.s3.listing import list_objects
from quire_gateway.s3.reserved import ChunkBackend
from quire_storage.core.chunks import Chunk
from quire_storage.tiers.object_tier import pack_object

MINE, OTHERS = b"m" * 16, b"o" * 16


async def _secret() -> bytes:
    return b"s" * 32


class _Tier:
    """Chunk objects of two namespaces. `looks`: how many headers were read."""

    def __init__(self) -> None:
        self.objects: dict[bytes, bytes] = {}
        self.looks = 0

    async def fill(self, derivation: DerivedKeys, namespace: bytes, count: int) -> list[str]:
        keys = ChunkKeys(os.urandom(32 * count))
        for derived in await derivation.derive(namespace, keys):
            record = ChunkRecord(derived, b"", derived, b"", namespace)
            payload = np.zeros((1, 8), np.uint8)
            self.objects[derived] = pack_object(Chunk(record, 1, 8, np.zeros(1, np.uint32)), payload)
        return [f"{namespace.hex()}/{key.hex()}" for key in keys]

    async def head(self, key: bytes) -> ChunkAttributes | None:
        return ChunkAttributes(key, 1, len(self.objects[key]), 0.0, "e") if key in self.objects else None

    async def read(self, chunk: ChunkAttributes, start: int, end: int) -> memoryview:
        self.looks += 1
        return memoryview(self.objects[chunk.key])[start:end]

    async def shard(self, first: str) -> list[ChunkAttributes]:
        keys = sorted(key for key in self.objects if key[:1].hex() == first)
        return [ChunkAttributes(key, 1, len(self.objects[key]), 0.0, "e") for key in keys]

    async def write(self, key: bytes, data: bytes) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("digits", ["", "0", "8", "f"])
async def test_every_chunk_once(monkeypatch: pytest.MonkeyPatch, digits: str) -> None:
    """For prefixes that reach into keys, too: what is looked at last may sort before them."""
    monkeypatch.setattr(reserved, "_LOOKED_AT_MAX", 64)
    tier, derivation = _Tier(), DerivedKeys(_secret)
    await tier.fill(derivation, OTHERS, 300)
    names = await tier.fill(derivation, MINE, 60)
    backend = ChunkBackend(tier, None, derivation, contextlib.nullcontext)  # type: ignore[arg-type]
    prefix, after, listed, most = f"{MINE.hex()}/{digits}", "", list[str](), 0
    for _ in range(100):
        before = tier.looks
        listing = await list_objects(backend, prefix, "", after, 10)
        most = max(most, tier.looks - before)
        listed += [entry.key for entry in listing.objects]
        if not listing.truncated:
            break
        after = listing.last
    assert sorted(listed) == sorted(name for name in names if name.startswith(prefix))
    assert most <= 2 * 64 + 16, "a request looks at a bounded number of objects"


async def test_odd_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    tier, derivation = _Tier(), DerivedKeys(_secret)
    names = await tier.fill(derivation, MINE, 4)
    backend = ChunkBackend(tier, None, derivation, contextlib.nullcontext)  # type: ignore[arg-type]
    assert not (await list_objects(backend, "", "", "", 10)).objects, "of no namespace"
    slash = await list_objects(backend, f"{MINE.hex()}/", "/", "", 10)
    assert {entry.key for entry in slash.objects} == set(names)
    with pytest.raises(S3Error) as refused:
        await list_objects(backend, f"{MINE.hex()}/", names[0][40], "", 10)
    assert refused.value.code == "InvalidArgument"
    with pytest.raises(S3Error):
        await list_objects(backend, f"{MINE.hex()}/", "", f"{OTHERS.hex()}/{'0' * 64}", 10)
