"""What simulated engines store: chains of chunks that share their beginnings, and the bytes of each."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.model.policy import NAMESPACE_TAG_BYTES, NamespacePolicy

LAYOUT = KvLayout(2, 16, 1, 32, Dtype.FP16)
SHAPES = (LAYOUT, KvLayout(200, 16, 1, 2, Dtype.FP16), KvLayout(9, 16, 1, 16, Dtype.FP16))
"""Of the second tenant's chunks. The headers of those with 200 layers take several units."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A chain of chunks of a tenant."""

    namespace: Namespace
    keys: ChunkKeys

    @property
    def layout(self) -> KvLayout:
        return self.namespace.layout


def prefixes(rng: random.Random, tenants: int = 2, roots: int = 5, length: int = 10) -> list[Prefix]:
    """Chains that share their beginnings; none of two tenants, whose chunks may have other shapes."""
    found = []
    for tenant in range(tenants):
        layout = rng.choice(SHAPES) if tenant else LAYOUT
        namespace = Namespace("model", "v1", layout, f"tenant-{tenant}".encode())
        for root in range(roots):
            for branch in range(2):
                packed, parent = [], namespace.digest()
                shared = rng.randrange(2, length - 2)
                for at in range(rng.randrange(length // 2, length + 1)):
                    label = f"{root}/{branch if at >= shared else 0}/{at}".encode()
                    parent = hashlib.sha256(parent + label).digest()
                    packed.append(parent)
                found.append(Prefix(namespace, ChunkKeys(b"".join(packed))))
    return found


def bounds(rng: random.Random, namespace: Namespace) -> list[NamespacePolicy]:
    """Bound a namespace on some days, by age or by size: chunks that are too old go, or the coldest."""
    ttl_s, chunks = rng.choice([0, 0, 2]), rng.choice([0, 0, 24])
    tag, quota_bytes = namespace.digest()[:NAMESPACE_TAG_BYTES], chunks * namespace.layout.chunk_bytes
    return [NamespacePolicy(tag, ttl_s, quota_bytes)] if ttl_s or chunks else []


def content(key: bytes, version: int, layout: KvLayout) -> npt.NDArray[np.uint8]:
    """(layers, slice bytes) of a chunk, as one engine computes it; another version is another engine's."""
    row = np.frombuffer(hashlib.sha256(key + bytes([version])).digest(), dtype=np.uint8)
    size = layout.num_layers * layout.slice_bytes
    return np.tile(row, -(-size // len(row)))[:size].reshape(layout.num_layers, layout.slice_bytes)
