"""Addresses of strangers are tried by processes that may die of them. Real UCX."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import struct
import zlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import pytest_asyncio

from quire.client.memory.buffers import Buffer
from quire.model.descriptor import RdmaTarget
from quire.model.errors import QuireError, TargetInvalid
from quire.transport import OFF, AddressNonce, AutoTransport, data_plane, decode_message
from quire_storage.adapters.nonces import NonceSender

pytestmark = pytest.mark.timeout(120)


class _Client:
    """A process on the data plane, and a piece of its memory."""

    def __init__(self, transport: AutoTransport) -> None:
        self.buffer = Buffer.allocate(transport, 64)
        self.halves: asyncio.Queue[bytes] = asyncio.Queue()
        transport.on_message(self._on_message)

    def _on_message(self, raw: bytes) -> None:
        message = decode_message(raw)
        assert isinstance(message, AddressNonce)
        self.halves.put_nowait(message.half)

    async def received(self) -> bytes:
        async with asyncio.timeout(20):
            half = await self.halves.get()
        assert self.buffer.view is not None
        return self.buffer.view[:16].tobytes() + half


@pytest_asyncio.fixture
async def client() -> AsyncIterator[_Client]:
    transport = data_plane(OFF)
    await transport.start()
    yield _Client(transport)
    await transport.close()


@pytest.fixture
def sender() -> Iterator[NonceSender]:
    made = NonceSender("")
    yield made
    made.close()


async def test_a_nonce_arrives_as_a_layer_does(client: _Client, sender: NonceSender) -> None:
    for _ in range(2):
        nonce = os.urandom(32)
        await sender.send(client.buffer.target(), nonce)
        assert await client.received() == nonce


async def test_a_first_nonce_writes_nothing(client: _Client, sender: NonceSender) -> None:
    await sender.send(client.buffer.target(), b"message of 16 B.")
    assert await client.received() == bytes(16) + b"message of 16 B."


async def test_a_helper_that_died_is_started_again(client: _Client, sender: NonceSender) -> None:
    nonce = os.urandom(32)
    await sender.send(client.buffer.target(), nonce)
    assert sender._helper is not None
    sender._helper.kill()
    sender._helper.wait()
    with contextlib.suppress(TargetInvalid):
        await sender.send(client.buffer.target(), nonce)
    await sender.send(client.buffer.target(), nonce)


def _forged(target: RdmaTarget, chance: random.Random, *, key: bool = False) -> RdmaTarget:
    """With bytes of the address changed, or lost, or of the key, and sound checksums: by one who knows the format."""
    address, secret = target.worker_address[14:], target.remote_key[13:]
    if key:
        secret = _damaged(secret, chance)
    else:
        address = _damaged(address, chance)
    return replace(
        target,
        worker_address=_joined(target.worker_address[5:10] + struct.pack("<I", zlib.crc32(address)) + address),
        remote_key=_joined(target.remote_key[5:9] + struct.pack("<I", zlib.crc32(secret)) + secret),
    )


def _joined(ucx: bytes) -> bytes:
    """Without a part for shared memory."""
    return struct.pack("<3sH", b"QN1", len(ucx)) + ucx


def _damaged(raw: bytes, chance: random.Random) -> bytes:
    kind = chance.randrange(4)
    if kind == 0:
        return raw[: chance.randrange(1, len(raw))]
    if kind == 1:
        return chance.randbytes(len(raw))
    changed = bytearray(raw)
    for _ in range(chance.randrange(1, 6)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


async def _outcomes(sender: NonceSender, targets: list[RdmaTarget]) -> list[str]:
    async def attack(target: RdmaTarget) -> str:
        try:
            await sender.send(target, os.urandom(32))
        except QuireError as error:
            return str(error)
        return "sent"

    return await asyncio.gather(*map(attack, targets))


async def test_forged_addresses_cost_their_own_request(client: _Client, sender: NonceSender) -> None:
    """Some crash the process that tries them, some are never reached, some still work. An honest one then does."""
    good, chance = client.buffer.target(), random.Random(7)
    outcomes = await _outcomes(sender, [_forged(good, chance) for _ in range(32)])
    assert any("crashed the process" in each for each in outcomes), "or this tests nothing"
    while not client.halves.empty():
        client.halves.get_nowait()
    nonce = os.urandom(32)
    await sender.send(good, nonce)
    assert await client.received() == nonce


async def test_forged_keys_crash_no_process(client: _Client, sender: NonceSender) -> None:
    """Those at an address that was proved come to the node itself."""
    good, chance = client.buffer.target(), random.Random(8)
    outcomes = await _outcomes(sender, [_forged(good, chance, key=True) for _ in range(24)])
    assert not any("crashed the process" in each for each in outcomes), outcomes
    assert any("remote key" in each for each in outcomes)
