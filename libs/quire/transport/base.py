"""The data plane as a port: registered memory, one-sided reads and writes, ordered announced payloads, short messages.

Laws that every implementation keeps, and `quire.testing.contracts.TransportContract` checks: a message announced after
bytes arrives after them; a transfer outside of either side's registered range raises `TargetInvalid` and moves
nothing; after `drain` returned or raised `PeerLost`, no transfer touches either side's memory; a peer's death raises
`PeerLost` and costs other peers nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quire.model.descriptor import RdmaTarget
from quire.model.errors import PeerLost


class Region(Protocol):
    """Registered memory here. `view`: its bytes."""

    @property
    def address(self) -> int:
        """Address of its first byte, in this process."""

    @property
    def length(self) -> int:
        """Bytes."""

    @property
    def remote_key(self) -> bytes:
        """Key that opens it to a peer, next to its address."""

    def close(self) -> None:
        """Unregister. Not while a peer may still be writing."""


class Remote(Protocol):
    """A peer's registered range, opened for access."""

    @property
    def length(self) -> int:
        """Bytes."""

    def close(self) -> None:
        """Not while a transfer uses it."""


class PayloadStream(Protocol):
    """Ordered payloads of one producer; not for two tasks at once."""

    @property
    def bytes_posted(self) -> int:
        """So far, by all calls."""

    async def send(self, offset: int, length: int, remote_offset: int) -> None:
        """Put a contiguous range; returns when posted."""

    async def gather(self, offsets: npt.NDArray[np.int64], length: int, remote_offset: int) -> None:
        """Put `length` bytes from each of `offsets`, back to back; returns when posted."""

    async def place(self, write: Callable[[], None], length: int) -> None:
        """Run `write`, which fills `length` bytes of the peer's `memory`, in its turn, in a thread.

        Returns when posted. Its errors end the stream. Only where the peer's memory is this host's.
        """

    def announce(self, message: bytes, then: Callable[[], None] | None = None) -> None:
        """Send `message` (none if empty), and call `then`, once everything put so far has arrived."""

    async def drain(self, timeout_s: float) -> None:
        """Wait until nothing is in flight. Raises what went wrong."""

    def stop(self) -> None:
        """Post nothing more."""


class Peer(Protocol):
    """A connection."""

    @property
    def error(self) -> PeerLost | None:
        """Why it is lost; None while it is not."""

    @property
    def reached(self) -> bool:
        """Whether it was ever got through to. A failure before that says nothing of the peer itself."""

    def on_failure(self, callback: Callable[[PeerLost], None]) -> Callable[[], None]:
        """Call back once when the peer is found dead. Returns a function that takes the callback back."""

    async def remote(self, target: RdmaTarget) -> Remote:
        """Open the peer's range. Raises `TargetInvalid` for a key that cannot be used."""

    def memory(self, remote: Remote) -> npt.NDArray[np.uint8] | None:
        """The range's bytes, where they are this host's memory too."""

    async def get(
        self, region: Region, offset: int, length: int, remote: Remote, remote_offset: int, *, timeout_s: float
    ) -> None:
        """Read from the peer's memory."""

    def stream(self, region: Region, remote: Remote, tenant: str = "") -> PayloadStream:
        """Ordered payloads from `region` into `remote`. At threads that copy, tenants take turns."""

    def send(self, message: bytes) -> None:
        """A short message."""

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything sent has left."""

    async def settle(self, timeout_s: float) -> None:
        """Wait until no transfer of this connection touches memory here. Raises `DeadlineExceeded`."""

    async def close(self) -> None:
        """Flush posted puts, notify the peer, and disconnect."""

    def abort(self) -> None:
        """Disconnect now: operations in flight end with an error."""


class Transport(Protocol):
    """The data plane of one process and loop."""

    @property
    def name(self) -> str:
        """Name of the kind of transport, for metrics and errors."""

    @property
    def description(self) -> str:
        """Description for logs."""

    @property
    def address(self) -> bytes:
        """Address that a peer needs to connect here."""

    proof: bytes
    """That the address is this process's own, for the gateways of a cluster (`quire.model.address_proof`); or empty."""

    async def start(self) -> None:
        """Before anything else, in the loop that it is used in."""

    async def close(self) -> None:
        """End all connections, and give up registered regions."""

    def allocate(self, length: int) -> npt.NDArray[np.uint8]:
        """Zeroed memory, to be registered, that peers reach in the best way that there is."""

    def register(self, buffer: Any) -> Region:
        """Register a writable contiguous buffer (numpy, mmap, torch); kept alive until the region is closed."""

    def connect(self, address: bytes) -> Peer:
        """The connection to that address; the same one while it is alive."""

    def on_message(self, handler: Callable[[bytes], None]) -> None:
        """Set the receiver of messages."""

    def expecting(self) -> AbstractContextManager[None]:
        """While inside, messages are about to arrive: spin a little rather than sleep."""
