"""Guarantees of an acknowledged store."""

from __future__ import annotations

from enum import Enum


class Durability(Enum):
    """Losses that an acknowledged chunk survives: the process, the disk, the node, the cluster."""

    MEMORY = "memory"
    LOCAL = "local"
    REPLICATED = "replicated"
    OBJECT = "object"


class OnExisting(Enum):
    """A chunk whose key is stored already: skip it, or read its bytes and compare."""

    SKIP = "skip"
    VERIFY = "verify"
