"""A side of a transfer between two versions of UCX: `python -m tests.versions.side client|node`, by lines of JSON.

The client has memory with a payload. The node reads it, as for a store, and writes it back in another order behind
itself, as for a delivery; then it announces that. The client verifies the bytes when the announcement is there, and
answers the node with a message.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Final

import numpy as np
import numpy.typing as npt

import quire.transport.ucx
from quire.model.descriptor import RdmaTarget
from quire.transport.ucx import UcxTransport

_SLICE_BYTES: Final = 24 << 10
_SLICES: Final = 200
_LIMIT_S: Final = 10.0
_ORDER: Final = np.random.default_rng(1).permutation(_SLICES).astype(np.int64) * _SLICE_BYTES
PAYLOAD_BYTES: Final = _SLICES * _SLICE_BYTES


def _payload() -> npt.NDArray[np.uint8]:
    return np.random.default_rng(2).integers(0, 256, PAYLOAD_BYTES, dtype=np.uint8)


def _ordered(payload: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return payload.reshape(_SLICES, _SLICE_BYTES)[_ORDER // _SLICE_BYTES].reshape(-1)


def _tell(*facts: object) -> None:
    print(json.dumps(facts), flush=True)


async def _heard() -> list[str]:
    facts: list[str] = json.loads(await asyncio.to_thread(sys.stdin.readline))
    return facts


async def client() -> None:
    transport = UcxTransport()
    await transport.start()
    memory = transport.allocate(2 * PAYLOAD_BYTES)
    memory[:PAYLOAD_BYTES] = _payload()
    region, announced = transport.register(memory), asyncio.Event()
    transport.on_message(lambda message: announced.set() if message == b"written" else None)
    _tell(transport.address.hex(), str(region.address), region.remote_key.hex())
    (node,) = await _heard()
    with transport.expecting():
        async with asyncio.timeout(_LIMIT_S):
            await announced.wait()
    sound = bool((memory[PAYLOAD_BYTES:] == _ordered(_payload())).all())
    peer = transport.connect(bytes.fromhex(node))
    peer.send(b"verified" if sound else b"unsound")
    await peer.flush(_LIMIT_S)
    _tell("sound" if sound else "unsound")
    await asyncio.to_thread(sys.stdin.readline)


async def node() -> None:
    transport = UcxTransport()
    await transport.start()
    answers: asyncio.Queue[bytes] = asyncio.Queue()
    transport.on_message(answers.put_nowait)
    _tell(transport.address.hex())
    address, start, key = await _heard()
    memory = transport.allocate(PAYLOAD_BYTES)
    region = transport.register(memory)
    peer = transport.connect(bytes.fromhex(address))
    target = RdmaTarget(bytes.fromhex(address), int(start), 2 * PAYLOAD_BYTES, bytes.fromhex(key))
    remote = await peer.remote(target)
    await peer.get(region, 0, PAYLOAD_BYTES, remote, 0, timeout_s=_LIMIT_S)
    assert (memory == _payload()).all(), "the payload was read"
    stream = peer.stream(region, remote)
    await stream.gather(_ORDER, _SLICE_BYTES, PAYLOAD_BYTES)
    stream.announce(b"written")
    await stream.drain(_LIMIT_S)
    with transport.expecting():
        answer = await asyncio.wait_for(answers.get(), _LIMIT_S)
    _tell(answer.decode())
    await asyncio.to_thread(sys.stdin.readline)


def main(role: str, versions: str) -> None:
    if versions == "any":
        quire.transport.ucx.understands = lambda ours, theirs: True
    asyncio.run({"client": client, "node": node}[role]())


if __name__ == "__main__":
    main(*sys.argv[1:])
