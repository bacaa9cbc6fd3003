"""Nonces to worker addresses of tenants, each sent by its own process.

UCX does not validate addresses: a forged one can crash the process that connects to it, or block it. A helper process,
which never opens UCX itself, forks for each address, so that a crash affects one request. Run as a program, this module
is the helper.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Final

from quire.model.address_proof import HALF_BYTES
from quire.model.descriptor import RdmaTarget
from quire.model.errors import DeadlineExceeded, QuireError, TargetInvalid, TooManyRequests, by_code
from quire.transport import AddressNonce, ucx_transport
from quire.transport.auto import ucx_target
from quire.transport.messages import encode_message
from quire_server.core.shares import SharedBound
from quire_server.limits.turns import FairTurns

_SENT: Final = b"sent"
_AT_ONCE: Final = 8
_WAITING_MAX: Final = 64
_SEND_S: Final = 4.0
_ALARM_S: Final = 10
_MESSAGE_BYTES: Final = 1 << 16
_PR_SET_PDEATHSIG: Final = 1


class NonceSender:
    """The `Nonces` port. The helper starts with the first nonce."""

    def __init__(self, ucx_tls: str) -> None:
        """`ucx_tls`: the transports of UCX, those of the node's data plane."""
        self._ucx_tls = ucx_tls
        self._helper: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._turns = FairTurns(_AT_ONCE)
        self._room = SharedBound(_WAITING_MAX)

    async def send(self, target: RdmaTarget, nonce: bytes, tenant: str = "") -> None:
        """Send 16 bytes as a message; of 32, write the first half into the target, and send the second one behind it.

        Raises:
            TargetInvalid: The address or the key is not valid, or crashed its process.
            PeerLost: The address is not reachable.
            DeadlineExceeded: The fork did not respond.
            TooManyRequests: Too many addresses are queued.
        """
        if not self._room.take(tenant):
            raise TooManyRequests(f"{self._room.taken} addresses are queued", retry_after_s=1.0)
        try:
            async with self._turns.turn(tenant):
                answer = await self._asked({"target": target.to_token(), "nonce": nonce.hex()})
        finally:
            self._room.give_back(tenant)
        if answer == _SENT:
            return
        if not answer:
            raise TargetInvalid("it crashed the process that connected to it", field="target.worker_address")
        error = json.loads(answer)
        raise by_code(error["error"])(error["message"], field=error["field"])

    def close(self) -> None:
        if self._helper is not None and self._socket is not None:
            self._socket.close()
            self._helper.kill()
            self._helper.wait()
            self._helper = self._socket = None

    async def _asked(self, request: dict[str, str]) -> bytes:
        """Return the fork's response; empty if it ended without one."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                socket.send_fds(self._started(), [json.dumps(request).encode()], [theirs.fileno()])
            ours.setblocking(False)
            try:
                async with asyncio.timeout(2 * _ALARM_S):  # the alarm comes first
                    return await asyncio.get_running_loop().sock_recv(ours, _MESSAGE_BYTES)
            except TimeoutError:
                raise DeadlineExceeded("the process that connects to the address does not respond") from None
            except ConnectionError:
                return b""

    def _started(self) -> socket.socket:
        if self._helper is not None and self._helper.poll() is not None:
            self.close()
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                command = [sys.executable, "-m", __name__, str(theirs.fileno()), self._ucx_tls]
                self._helper = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        return self._socket


# ---- the helper


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # with the node, also where that is killed
    import quire.transport.ucx  # noqa: F401  # what the forks need

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    requests, ucx_tls = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    while True:
        raw, (*answers,), *_ = socket.recv_fds(requests, _MESSAGE_BYTES, 1)
        if not raw:
            return
        if os.fork():
            os.close(answers[0])
            continue
        signal.alarm(_ALARM_S)
        requests.close()
        with socket.socket(fileno=answers[0]) as answer:
            answer.send(_try(json.loads(raw), ucx_tls))
        os._exit(0)


def _try(request: dict[str, str], ucx_tls: str) -> bytes:
    try:
        target, nonce = RdmaTarget.from_token(request["target"]), bytes.fromhex(request["nonce"])
        asyncio.run(_send(ucx_target(target), nonce, ucx_tls))
    except QuireError as error:
        return json.dumps({"error": error.code(), "message": error.message, "field": error.field}).encode()
    return _SENT


async def _send(target: RdmaTarget, nonce: bytes, ucx_tls: str) -> None:
    """Send a nonce in the same way as a node delivers a layer: bytes, then a message; or the message alone."""
    transport = ucx_transport(**({"TLS": ucx_tls} if ucx_tls else {}))
    await transport.start()
    written, message = nonce[:-HALF_BYTES], encode_message(AddressNonce(nonce[-HALF_BYTES:]))
    peer = transport.connect(target.worker_address)
    if written:
        memory = transport.allocate(len(written))
        memory[:] = list(written)
        stream = peer.stream(transport.register(memory), await peer.remote(target))
        await stream.send(0, len(written), 0)
        stream.announce(message)
        await stream.drain(_SEND_S)
    else:
        peer.send(message)
        await peer.flush(_SEND_S)
    await peer.close()


if __name__ == "__main__":
    main()
