"""Versions of the protocol: which one the peer speaks, and whether it can be served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quire import PROTOCOL_OLDEST, PROTOCOL_VERSION
from quire.model.errors import VersionUnsupported

HEADER: Final = "quire-protocol"
SPOKEN: Final = ((HEADER, f"{PROTOCOL_OLDEST}-{PROTOCOL_VERSION}"),)
"""Metadata of every call: the oldest that the caller understands, and the newest."""


def understood(newest: int) -> bool:
    """Return whether this side understands a caller, which understands this side."""
    return newest >= PROTOCOL_OLDEST


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Check a request; one without a version comes from a plain gRPC client. Raises `VersionUnsupported`."""
    announced = metadata.get(HEADER)
    if announced is None:
        return
    oldest, _, newest = announced.partition("-")
    newest = newest or oldest
    fits = oldest.isdigit() and newest.isdigit() and int(oldest) <= PROTOCOL_VERSION and understood(int(newest))
    if not fits:
        version = SPOKEN[0][1]
        raise VersionUnsupported(
            f"it speaks protocol {announced}, here {version}: upgrade the older side", field="protocol"
        )


def check(newest: int) -> None:
    """Check a node. Raises `VersionUnsupported`."""
    if not understood(newest):
        version = SPOKEN[0][1]
        raise VersionUnsupported(
            f"it speaks protocol {newest}, here {version}: upgrade the older side", field="protocol"
        )
