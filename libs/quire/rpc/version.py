"""Which protocol the other side speaks, and whether it can be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quire import PROTOCOL_OLDEST, PROTOCOL_VERSION
from quire.errors import VersionUnsupported

HEADER: Final = "quire-protocol"
SPOKEN: Final = ((HEADER, str(PROTOCOL_VERSION)),)
"""Metadata of every call."""


def understood(version: int) -> bool:
    return PROTOCOL_OLDEST <= version <= PROTOCOL_VERSION


def check(version: int) -> None:
    """Raises `VersionUnsupported`."""
    if not understood(version):
        here = f"{PROTOCOL_OLDEST} to {PROTOCOL_VERSION}" if PROTOCOL_OLDEST < PROTOCOL_VERSION else PROTOCOL_VERSION
        raise VersionUnsupported(
            f"it speaks protocol {version}, here {here} is understood: upgrade the older side", field="protocol"
        )


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Of a request; one that says nothing comes from a plain gRPC client. Raises `VersionUnsupported`."""
    said = metadata.get(HEADER)
    if said is not None:
        check(int(said) if said.isdigit() else -1)
