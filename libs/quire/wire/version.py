"""Which protocol the other side speaks, and whether it can be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quire import PROTOCOL_OLDEST, PROTOCOL_VERSION
from quire.model.errors import VersionUnsupported

HEADER: Final = "quire-protocol"
SPOKEN: Final = ((HEADER, f"{PROTOCOL_OLDEST}-{PROTOCOL_VERSION}"),)
"""Metadata of every call: the oldest that the caller understands, and the newest."""


def understood(newest: int) -> bool:
    """Of a caller, which understands this side: whether this side understands it."""
    return newest >= PROTOCOL_OLDEST


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Of a request; one that says nothing comes from a plain gRPC client. Raises `VersionUnsupported`."""
    said = metadata.get(HEADER)
    if said is None:
        return
    oldest, _, newest = said.partition("-")
    newest = newest or oldest
    fits = oldest.isdigit() and newest.isdigit() and int(oldest) <= PROTOCOL_VERSION and understood(int(newest))
    if not fits:
        here = SPOKEN[0][1]
        raise VersionUnsupported(f"it speaks protocol {said}, here {here}: upgrade the older side", field="protocol")


def check(newest: int) -> None:
    """Of a node. Raises `VersionUnsupported`."""
    if not understood(newest):
        here = SPOKEN[0][1]
        raise VersionUnsupported(f"it speaks protocol {newest}, here {here}: upgrade the older side", field="protocol")
