"""The data plane that services and clients use: shared memory where both ends are of one host, UCX everywhere else.

Chosen for each region: memory that a peer cannot map, because its owner has allocated it in another way, goes by UCX.
Why shared memory was not used is kept, for `quire status`.
"""

from __future__ import annotations

import contextlib
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from quire.model.descriptor import RdmaTarget
from quire.model.errors import ConfigInvalid, PeerLost, QuireError, TargetInvalid
from quire.transport.base import PayloadStream, Peer, Region, Remote, Transport
from quire.transport.liveness import Liveness
from quire.transport.shared_memory import SharedMemoryTransport, SharedRegion

Bytes = npt.NDArray[np.uint8]
_FRAME: Final = struct.Struct("<3sH")
_MAGIC: Final = b"QN1"


class AutoTransport:
    """`shared` is None where this process does not use shared memory, for the reason `why_not`.

    `required`: it was requested, so a folder that cannot be used fails the start. `wary`: of UCX, which ends a process
    that is connected to by a peer to which it has no way back. While one that is connected to from here can be
    reached by shared memory only, this process does not publish a UCX address.
    """

    name = "nearest"
    proof = b""

    def __init__(
        self,
        ucx: Transport,
        shared: SharedMemoryTransport | None,
        why_not: str = "",
        *,
        required: bool = False,
        wary: bool = False,
    ) -> None:
        self.ucx = ucx
        self.wary = wary
        self._shared_only: set[bytes] = set()
        self._required = required
        self.shared = shared
        self.chosen: Counter[str] = Counter()
        """How many ranges were opened, by transport."""
        self.why_not = why_not
        """Why shared memory was not used, the last time that it was not; empty while it always was."""
        self._peers: dict[bytes, AutoPeer] = {}
        self._unshared = 0

    @property
    def description(self) -> str:
        shared = self.shared.description if self.shared is not None else "no shared memory"
        counts = "".join(f"; {count} ranges by {way}" for way, count in sorted(self.chosen.items()))
        why_not = f"; last not by shared memory: {self.why_not}" if self.why_not else ""
        return f"{self.ucx.description}, {shared}{counts}{why_not}"

    async def start(self) -> None:
        await self.ucx.start()
        if self.shared is None:
            return
        try:
            await self.shared.start()
        except ConfigInvalid as error:
            if self._required:
                await self.ucx.close()
                raise
            self.shared, self.why_not = None, error.message

    async def close(self) -> None:
        if self.shared is not None:
            await self.shared.close()
        self._peers.clear()
        await self.ucx.close()

    @property
    def address(self) -> bytes:
        ucx = b"" if self._shared_only else self.ucx.address
        return _joined(ucx, self.shared.address if self.shared is not None else b"")

    def allocate(self, length: int) -> Bytes:
        return (self.shared or self.ucx).allocate(length)

    def register(self, buffer: Any) -> Region:
        ucx = self.ucx.register(buffer)
        shared = self.shared.register(buffer) if self.shared is not None and _is_on_host(buffer) else None
        return _Region(self, ucx, cast(SharedRegion | None, shared))

    def connect(self, address: bytes) -> Peer:
        peer = self._peers.get(address)
        if peer is None or peer.error is not None:
            peer = self._peers[address] = AutoPeer(self, address)
            peer.on_failure(lambda _: self._forget(address))
        return peer

    def _forget(self, address: bytes) -> None:
        self._peers.pop(address, None)

    def on_message(self, handler: Callable[[bytes], None]) -> None:
        self.ucx.on_message(handler)
        if self.shared is not None:
            self.shared.on_message(handler)

    def expecting(self) -> AbstractContextManager[None]:
        """UCX spins only where something may come by it."""
        return self.ucx.expecting() if self._unshared or self.shared is None else contextlib.nullcontext()

    def reached_by_shared_memory_only(self, peer: Peer, address: bytes) -> None:
        """While it lives."""
        self._shared_only.add(address)
        peer.on_failure(lambda _: self._shared_only.discard(address))

    def missed(self, why: str) -> None:
        """Shared memory could not be used."""
        self.why_not = why

    def count_unshared(self, change: int) -> None:
        """Change the count of regions here that a peer can write to by UCX alone."""
        self._unshared += change


@dataclass(slots=True, eq=False)
class _Region:
    """Registered with both."""

    transport: AutoTransport
    ucx: Region
    shared: SharedRegion | None

    def __post_init__(self) -> None:
        self.transport.count_unshared(0 if self._shared_key else 1)

    @property
    def _shared_key(self) -> bytes:
        return self.shared.remote_key if self.shared is not None and self.shared.name else b""

    @property
    def address(self) -> int:
        return self.ucx.address

    @property
    def length(self) -> int:
        return self.ucx.length

    @property
    def remote_key(self) -> bytes:
        return _joined(self.ucx.remote_key, self._shared_key)

    def close(self) -> None:
        self.transport.count_unshared(0 if self._shared_key else -1)
        if self.shared is not None:
            self.shared.close()
        self.ucx.close()


@dataclass(slots=True)
class _Remote:
    """Opened by one of them."""

    at: Remote
    is_shared: bool

    @property
    def length(self) -> int:
        return self.at.length

    def close(self) -> None:
        self.at.close()


class AutoPeer:
    """The two connections to a member; that by UCX is made when it is needed."""

    def __init__(self, transport: AutoTransport, address: bytes) -> None:
        self._transport = transport
        self._address = address
        self._ucx_address, shared_address = _parted(address, "target.worker_address")
        self._ucx: Peer | None = None
        self._in_use = False  # UCX
        self._lost_unreached = False
        self._shared: Peer | None = None
        self._liveness = Liveness()
        self.on_failure = self._liveness.on_failure
        if transport.shared is None:
            pass
        elif not shared_address:
            transport.missed("the client does not use it")
        else:
            try:
                self._shared = transport.shared.connect(shared_address)
                self._shared.on_failure(self._liveness.fail)
            except QuireError as error:
                transport.missed(error.message)
        if self._shared is None:
            self._by_ucx()
        elif transport.wary:
            try:
                self._by_ucx()
            except PeerLost as error:
                self._no_way_back(error)

    @property
    def error(self) -> PeerLost | None:
        return self._liveness.error

    @property
    def reached(self) -> bool:
        by_ucx = self._ucx is not None and self._ucx.reached
        return not self._lost_unreached and (self._shared is not None or by_ucx)

    async def remote(self, target: RdmaTarget) -> Remote:
        ucx_key, shared_key = _parted(target.remote_key, "target.remote_key")
        if self._shared is not None and shared_key:
            try:
                by_shared = RdmaTarget(target.worker_address, target.address, target.length, shared_key)
                opened = _Remote(await self._shared.remote(by_shared), True)
                self._transport.chosen["shared_memory"] += 1
                return opened
            except (PeerLost, TargetInvalid) as error:
                self._liveness.check()
                self._transport.missed(error.message)
        elif self._shared is not None:
            self._transport.missed("the memory was not allocated by Quire")
        peer = self._by_ucx()
        by_ucx = RdmaTarget(self._ucx_address, target.address, target.length, ucx_key)
        opened = _Remote(await peer.remote(by_ucx), False)
        self._in_use = True
        self._transport.chosen["ucx"] += 1
        return opened

    def memory(self, remote: Remote) -> Bytes | None:
        assert isinstance(remote, _Remote)
        return self._at(remote).memory(remote.at)

    async def get(
        self, region: Region, offset: int, length: int, remote: Remote, remote_offset: int, *, timeout_s: float
    ) -> None:
        assert isinstance(remote, _Remote)
        local = _here(region, remote)
        await self._at(remote).get(local, offset, length, remote.at, remote_offset, timeout_s=timeout_s)

    def stream(self, region: Region, remote: Remote, tenant: str = "") -> PayloadStream:
        assert isinstance(remote, _Remote)
        return self._at(remote).stream(_here(region, remote), remote.at, tenant)

    def send(self, message: bytes) -> None:
        """Send by UCX once that is in use, behind its puts in flight."""
        self._liveness.check()
        (self._by_ucx() if self._in_use or self._shared is None else self._shared).send(message)

    async def flush(self, timeout_s: float) -> None:
        for peer in self._both():
            await peer.flush(timeout_s)

    async def settle(self, timeout_s: float) -> None:
        for peer in self._both():
            await peer.settle(timeout_s)

    async def close(self) -> None:
        for peer in self._both():
            await peer.close()

    def abort(self) -> None:
        for peer in self._both():
            peer.abort()

    # ----

    def _by_ucx(self) -> Peer:
        if not self._ucx_address:
            raise PeerLost(f"it can be reached by shared memory only, and: {self._transport.why_not}")
        if self._ucx is None:
            peer = self._ucx = self._transport.ucx.connect(self._ucx_address)
            peer.on_failure(partial(self._ucx_failed, peer))
        return self._ucx

    def _ucx_failed(self, peer: Peer, error: PeerLost) -> None:
        """A failure of UCX ends this peer, unless shared memory is there and UCX was never needed."""
        if self._shared is not None and not self._in_use and not peer.reached:
            self._no_way_back(error)
            return
        self._lost_unreached = not peer.reached
        self._liveness.fail(error)

    def _no_way_back(self, error: PeerLost) -> None:
        self._ucx = None
        self._transport.missed(f"no way back by UCX ({error.message})")
        self._transport.reached_by_shared_memory_only(self, self._address)

    def _at(self, remote: _Remote) -> Peer:
        peer = self._shared if remote.is_shared else self._ucx
        assert peer is not None, "it was opened by that"
        return peer

    def _both(self) -> list[Peer]:
        return [peer for peer in (self._shared, self._ucx) if peer is not None]


def _here(region: Region, remote: _Remote) -> Region:
    assert isinstance(region, _Region)
    local = region.shared if remote.is_shared else region.ucx
    if local is None:
        raise TargetInvalid("memory of a device is not copied by the host", field="source")
    return local


def _is_on_host(buffer: Any) -> bool:
    device = getattr(buffer, "device", None)
    return getattr(device, "type", device) in (None, "cpu")


def _joined(ucx: bytes, shared: bytes) -> bytes:
    return _FRAME.pack(_MAGIC, len(ucx)) + ucx + shared


def ucx_address(address: bytes) -> bytes:
    """Return the UCX part of a worker address; empty if the worker is reachable by shared memory only.

    Raises `TargetInvalid` if it is no worker address.
    """
    return _parted(address, "target.worker_address")[0]


def ucx_target(target: RdmaTarget) -> RdmaTarget:
    """Return the UCX part of a target. Raises `TargetInvalid` if there is none."""
    address, (key, _) = ucx_address(target.worker_address), _parted(target.remote_key, "target.remote_key")
    return RdmaTarget(address, target.address, target.length, key)


def _parted(pair: bytes, field: str) -> tuple[bytes, bytes]:
    """Split an address or a key: for UCX and for shared memory. Raises `TargetInvalid`."""
    if len(pair) > _FRAME.size:
        magic, length = _FRAME.unpack_from(pair)
        rest = pair[_FRAME.size :]
        if magic == _MAGIC and length <= len(rest):
            return rest[:length], rest[length:]
    raise TargetInvalid("no address or key of a data plane", field=field)
