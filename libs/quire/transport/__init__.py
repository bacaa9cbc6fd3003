"""The data plane as a port: UCX, shared memory, the nearer of both, and memory of this process for tests."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

from quire.model.errors import ConfigInvalid
from quire.transport.auto import AutoTransport, ucx_address
from quire.transport.base import PayloadStream, Peer, Region, Remote, Transport
from quire.transport.messages import AddressNonce, LayerProduced, LayerReady, Message, Quiesced, Stalled, decode_message
from quire.transport.shared_memory import SharedMemoryTransport

__all__ = [
    "OFF",
    "AddressNonce",
    "AutoTransport",
    "LayerProduced",
    "LayerReady",
    "Message",
    "PayloadStream",
    "Peer",
    "Quiesced",
    "Region",
    "Remote",
    "SharedMemoryTransport",
    "Stalled",
    "Transport",
    "data_plane",
    "data_plane_of_environment",
    "decode_message",
    "ucx_address",
    "ucx_transport",
    "users",
]
OFF: Final = "off"
"""In the place of a folder: no shared memory."""


def data_plane(
    shared_memory: str | Path = "", uids: Collection[int] = (), *, wary: bool = False, ucx_tls: str = ""
) -> AutoTransport:
    """Create the running loop's transport. `ucx_tls`: transports of UCX, e.g. "rc,tcp"; empty lets UCX choose.

    `shared_memory`: the folder of its sockets, or "off"; by default one of this user's own. `uids`: other
    users whose processes are served. `wary`: see `AutoTransport`.

    Raises `ConfigInvalid` where UCX is not installed.
    """
    ucx = ucx_transport(**({"TLS": ucx_tls} if ucx_tls else {}))
    if shared_memory == OFF:
        return AutoTransport(ucx, None, "switched off here")
    folder = Path(shared_memory) if shared_memory else None
    return AutoTransport(ucx, SharedMemoryTransport(folder, uids), required=folder is not None, wary=wary)


def data_plane_of_environment() -> AutoTransport:
    """Create it from QUIRE_SHARED_MEMORY and QUIRE_SHARED_MEMORY_UIDS."""
    uids = users(os.environ.get("QUIRE_SHARED_MEMORY_UIDS", ""))
    return data_plane(os.environ.get("QUIRE_SHARED_MEMORY", ""), uids, wary=True)


def users(text: str) -> list[int]:
    """Numbers, separated by commas. Raises `ConfigInvalid`."""
    try:
        return [int(uid) for uid in text.split(",") if uid.strip()]
    except ValueError:
        raise ConfigInvalid(f"{text!r} are no numbers of users", field="QUIRE_SHARED_MEMORY_UIDS") from None


def ucx_transport(**config: str) -> Transport:
    """UCX in the running loop. `config`: settings of UCX without their prefix, e.g. TLS="tcp".

    Loads UCX, which reads its settings from the environment where it is configured to leave the process alone. Raises
    `ConfigInvalid` where it is not installed.
    """
    try:
        from quire.transport.ucx import UcxTransport
    except ImportError as error:
        raise ConfigInvalid(f"UCX is missing: pip install 'quire[ucx]' ({error})", field="transport") from None
    return UcxTransport(**config)
