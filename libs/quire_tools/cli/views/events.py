"""`quire cache events`: chunks as they come and go, as JSON, or published as vLLM's KV events."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from quire.client import AdminClient
from quire.model.errors import ConfigInvalid
from quire.model.events import CacheEvent, EventKind, EventPage
from quire.model.index import OBJECT_TIER
from quire.model.keys import KEY_BYTES
from quire.model.records import NO_PARENT
from quire_tools.cli.cluster import as_operator

_NOT_KNOWN: Final = {"token_ids": [], "block_size": 0, "lora_id": None, "lora_name": None}
_LOCAL: Final = re.compile(r"(tcp://(127\.[0-9.]+|\[::1\]|localhost):|ipc://|inproc://)")
console = Console(highlight=False, soft_wrap=True)


def follow(folder: Path, admin: str, cursor: str, zmq: str, topic: str, curve: Path | None) -> None:
    """Print events until Ctrl-C."""
    tell = publisher(zmq, topic, curve) if zmq else _print

    async def work(operator: AdminClient) -> None:
        async for page in operator.watch(cursor):
            tell(page)

    as_operator(folder, admin, work)


def _print(page: EventPage) -> None:
    if page.lost:
        console.print(json.dumps({"lost": True, "cursor": page.cursor}))
    for event in page.events:
        fields = {
            "kind": event.kind.name.lower(),
            "holder": event.holder,
            "at_ms": event.at_ms,
            "keys": [key.hex() for key in event.keys],
            "parents": [parent.hex() for parent in _parents(event)],
            "cursor": page.cursor,
        }
        console.print(json.dumps(fields))


def publisher(address: str, topic: str = "", curve: Path | None = None) -> Callable[[EventPage], None]:
    """Sends pages to a ZMQ socket that it binds, as vLLM's publisher does: topic, number, a batch in MessagePack.

    After lost events all blocks count as removed.

    Args:
        address: On this host alone, or anywhere with `curve`: all tenants' keys are published.
        topic: Of the messages.
        curve: Folder with the publisher's own `server.key_secret`, and `clients/` with the public keys of those who may
            subscribe (`zmq.auth.create_certificates`).

    Raises:
        ConfigInvalid: The address is open to others without `curve`; a key is missing; pyzmq or msgspec is.
    """
    if curve is None and not _LOCAL.match(address):
        why = "others could read all tenants' keys there: give --curve, or bind to 127.0.0.1"
        raise ConfigInvalid(f"{address}: {why}", field="zmq")
    try:
        import msgspec
        import zmq
    except ImportError as error:
        raise ConfigInvalid(f"{error}: the extra `events` of Quire brings it", field="zmq") from None
    socket: Any = zmq.Context.instance().socket(zmq.PUB)
    if curve is not None:
        _guard(socket, curve)
    socket.bind(address)
    encode = msgspec.msgpack.Encoder().encode
    number = 0

    def publish(page: EventPage) -> None:
        nonlocal number
        events: list[dict[str, Any]] = [{"type": "AllBlocksCleared"}] if page.lost else []
        for event in page.events:
            events += vllm_events(event)
        if events:
            socket.send_multipart([topic.encode(), number.to_bytes(8, "big"), encode([time.time(), events])])
            number += 1

    return publish


def _guard(socket: Any, folder: Path) -> None:
    """Encrypt, and accept subscribers whose public keys are in the folder. Raises `ConfigInvalid`."""
    import zmq.auth
    from zmq.auth.thread import ThreadAuthenticator

    try:
        public, secret = zmq.auth.load_certificate(folder / "server.key_secret")
        clients = sorted((folder / "clients").glob("*.key"))
    except (OSError, ValueError) as error:
        raise ConfigInvalid(f"{folder}: {error}", field="curve") from None
    if secret is None or not clients:
        raise ConfigInvalid(f"{folder}: needs server.key_secret, and clients/*.key", field="curve")
    authenticator = ThreadAuthenticator(zmq.Context.instance())
    authenticator.start()
    authenticator.configure_curve(domain="*", location=str(folder / "clients"))
    socket.curve_publickey, socket.curve_secretkey, socket.curve_server = public, secret, True


def vllm_events(event: CacheEvent) -> list[dict[str, Any]]:
    """Convert to vLLM's `BlockStored` and `BlockRemoved`.

    Hashes are Quire's keys, tokens are unknown, `ownership` is the holder. Chunks of one chain that follow each other
    are one event. vLLM has no event for a holder that lost everything: all blocks are cleared.
    """
    if event.kind is EventKind.CLEARED:
        return [{"type": "AllBlocksCleared"}]
    where = {
        "medium": "STORAGE" if event.holder == OBJECT_TIER else "QUIRE",
        "locality": "REMOTE",
        "ownership": event.holder,
    }
    keys = list(event.keys)
    if event.kind is EventKind.REMOVED:
        return [{"type": "BlockRemoved", "block_hashes": keys, **where}]
    events: list[dict[str, Any]] = []
    parent_hash = b""
    for key, parent in zip(keys, _parents(event), strict=True):
        if events and parent == parent_hash:
            events[-1]["block_hashes"].append(key)
        else:
            above = None if parent == NO_PARENT else parent
            events.append(
                {"type": "BlockStored", "block_hashes": [key], "parent_block_hash": above, **_NOT_KNOWN, **where}
            )
        parent_hash = key
    return events


def _parents(event: CacheEvent) -> Sequence[bytes]:
    return [event.parents[at : at + KEY_BYTES] for at in range(0, len(event.parents), KEY_BYTES)]
