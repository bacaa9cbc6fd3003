"""Weighted rendezvous hashing, many names at once: which node has the strongest claim on a name.

A node that joins or leaves moves only its own share, and that is as large as its weight (Schindelhauer and Schomaker,
Weighted Distributed Hash Tables).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from quire.model.nodes import Node

Scores = npt.NDArray[np.float64]
_MIX: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Claims:
    """Claims of nodes with weights, each over 0, on names. `nodes`: (name, weight)."""

    def __init__(self, nodes: Sequence[tuple[str, float]]) -> None:
        self.names = [name for name, _ in nodes]
        self._seeds = np.array([_seed(name) for name in self.names], dtype=np.uint64)
        self._weights = np.array([weight for _, weight in nodes], dtype=np.float64)

    def scores(self, names: Sequence[bytes]) -> Scores:
        """(names, nodes): the higher, the stronger."""
        heads = np.frombuffer(b"".join(map(_digest, names)), dtype=">u8").astype(np.uint64)
        mixed = _mixed(heads[:, None] ^ self._seeds[None, :])
        uniform = (np.right_shift(mixed, np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        strength: Scores = self._weights[None, :] / -np.log(uniform)
        return strength

    def strongest(self, names: Sequence[bytes]) -> list[str]:
        """The node with the strongest claim on each."""
        return [self.names[at] for at in np.argmax(self.scores(names), axis=1)] if names else []


def claims_by_capacity(nodes: Iterable[Node]) -> Claims:
    """Claims of storage nodes, by their capacity."""
    return _claims(tuple((node.node_id, float(max(1, node.capacity_bytes))) for node in nodes))


@lru_cache(maxsize=16)
def _claims(nodes: tuple[tuple[str, float], ...]) -> Claims:
    return Claims(nodes)


@lru_cache(maxsize=8192)
def _seed(name: str) -> int:
    return int.from_bytes(_digest(name.encode()), "big")


def _digest(name: bytes) -> bytes:
    return hashlib.blake2b(name, digest_size=8).digest()


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer: each bit of the result depends on all of a value's."""
    for shift, factor in zip((30, 27), _MIX, strict=True):
        values = (values ^ np.right_shift(values, np.uint64(shift))) * factor
    return values ^ np.right_shift(values, np.uint64(31))
