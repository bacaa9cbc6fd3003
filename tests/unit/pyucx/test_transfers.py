"""Transfers between two workers of one process, over tcp and cma: the transports that a remote peer gets here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from pyucx import (
    Closed,
    Context,
    Endpoint,
    InvalidRemoteKey,
    Memory,
    MessageTooLong,
    OperationTimeout,
    PeerDied,
    RemoteMemory,
    TargetOutOfRange,
    Worker,
    gathers_correctly,
    library,
)

_BYTES = 6 << 20


@dataclass(slots=True)
class Pair:
    """A writer and a receiver; `remote` is `there` as the writer sees it."""

    source: npt.NDArray[np.uint8]
    target: npt.NDArray[np.uint8]
    here: Memory
    there: Memory
    endpoint: Endpoint
    remote: RemoteMemory
    receiver: Worker
    messages: asyncio.Queue[bytes]


@pytest.fixture(params=["tcp", "tcp,cma"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    source = np.random.default_rng(1).integers(0, 256, _BYTES, dtype=np.uint8)
    target = np.zeros(_BYTES, dtype=np.uint8)
    messages: asyncio.Queue[bytes] = asyncio.Queue()
    with Context(TLS=request.param) as context:
        async with AsyncExitStack() as stack:
            writer = await stack.enter_async_context(Worker(context))
            receiver = await stack.enter_async_context(Worker(context))
            receiver.on_message(1, messages.put_nowait)
            here, there = context.register(source), context.register(target)
            endpoint = writer.connect(receiver.address())
            remote = endpoint.remote_memory(there.address, there.length, there.remote_key)
            yield Pair(source, target, here, there, endpoint, remote, receiver, messages)
            remote.close()
            await endpoint.close(5)
            here.close()
            there.close()


async def test_put_is_readable_after_flush(pair: Pair) -> None:
    """What was put is at the target once flush has returned, and nothing beside it changed."""
    await pair.endpoint.put(pair.here, 100, 1 << 20, pair.remote, 4096, timeout_s=10)
    await pair.endpoint.flush(10)
    assert np.array_equal(pair.target[4096 : 4096 + (1 << 20)], pair.source[100 : 100 + (1 << 20)])
    assert not pair.target[:4096].any() and not pair.target[4096 + (1 << 20) :].any()


async def test_get_reads_the_peer(pair: Pair) -> None:
    """get brings the peer's bytes."""
    pair.target[:] = 9
    await pair.endpoint.get(pair.here, 0, 1 << 20, pair.remote, 0, timeout_s=10)
    assert (pair.source[: 1 << 20] == 9).all()


@pytest.mark.skipif(library.version < (1, 14, 0), reason="the IOV put of UCX 1.13 is wrong, which the self-test finds")
async def test_gathered_put_keeps_the_order(pair: Pair) -> None:
    """Slices land back to back in the order of their offsets."""
    assert await gathers_correctly()
    offsets = np.array([5, 0, 3, 1], dtype=np.int64) * 65536
    await pair.endpoint.put_gathered(pair.here, offsets, 65536, pair.remote, 0, timeout_s=10)
    await pair.endpoint.flush(10)
    expected = np.concatenate([pair.source[at : at + 65536] for at in offsets.tolist()])
    assert np.array_equal(pair.target[: len(expected)], expected)


async def test_stream_announces_only_what_is_there(pair: Pair) -> None:
    """When a layer's message arrives its bytes are there: 3 rounds of 6 layers, each checked at its message."""
    size = 1 << 20
    for round_number in range(3):
        pair.source[:] = np.random.default_rng(round_number).integers(0, 256, _BYTES, dtype=np.uint8)
        stream = pair.endpoint.stream(pair.here, pair.remote, 1, window_bytes=2 << 20, slice_bytes=1 << 18)

        async def produce(stream: object = stream) -> None:
            for layer in range(6):
                await stream.send(layer * size, size, layer * size)  # type: ignore[attr-defined]
                stream.announce(bytes([layer]))  # type: ignore[attr-defined]
            await stream.drain(20)  # type: ignore[attr-defined]

        producer = asyncio.create_task(produce())
        for layer in range(6):
            async with asyncio.timeout(20):
                assert await pair.messages.get() == bytes([layer])
            part = slice(layer * size, (layer + 1) * size)
            assert np.array_equal(pair.target[part], pair.source[part])
        await producer


async def test_stopped_stream_announces_nothing_more(pair: Pair) -> None:
    """After stop, drain returns once nothing is in flight, and later sends are refused."""
    stream = pair.endpoint.stream(pair.here, pair.remote, 1)
    await stream.send(0, 1 << 20, 0)
    stream.stop()
    await stream.drain(10)
    with pytest.raises(Closed):
        await stream.send(0, 1, 0)
    assert pair.messages.empty()


async def test_a_stopped_stream_is_drained_when_a_flush_says_so(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding D13: a put that has completed at its source may still be on its way to the target."""
    stream = pair.endpoint.stream(pair.here, pair.remote, 1)
    flushes: list[Callable[[int], None]] = []
    monkeypatch.setattr(pair.endpoint, "post_flush", flushes.append)
    await stream.send(0, 1 << 20, 0)
    stream.stop()
    stream.stop()
    with pytest.raises(OperationTimeout):
        await stream.drain(0.5)
    assert stream._in_flight_puts == 0 and len(flushes) == 1, (
        "all puts have completed here, and one flush was asked for"
    )
    flushes[0](0)
    await stream.drain(10)


async def test_a_stream_whose_connection_has_failed_can_be_stopped(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client died: nothing arrives there any more, and what its delivery holds is given back."""
    stream = pair.endpoint.stream(pair.here, pair.remote, 1)

    def fails(completion: Callable[[int], None]) -> None:
        raise PeerDied("flush", -80, "the peer is gone")

    monkeypatch.setattr(pair.endpoint, "post_flush", fails)
    stream.stop()
    await stream.drain(1)


@pytest.mark.parametrize("offset,length", [(_BYTES - 10, 11), (-1, 4), (0, _BYTES + 1)])
async def test_out_of_range_target_is_refused_here(pair: Pair, offset: int, length: int) -> None:
    """Nothing checks at the target, so the range is checked before the put: nothing is written."""
    with pytest.raises(TargetOutOfRange):
        await pair.endpoint.put(pair.here, 0, min(length, _BYTES), pair.remote, offset if length <= _BYTES else 1)
    stream = pair.endpoint.stream(pair.here, pair.remote, 1)
    with pytest.raises(TargetOutOfRange):
        await stream.gather(np.array([0, _BYTES - 5], dtype=np.int64), 10, 0)
    assert not pair.target.any()


async def test_damaged_key_is_refused(pair: Pair) -> None:
    """A truncated or altered remote key raises, and the endpoint still works."""
    good = pair.there.remote_key
    for bad in (b"", good[:6], good[:-1], good[:-1] + bytes([good[-1] ^ 1]), b"XXXX" + good[4:]):
        with pytest.raises(InvalidRemoteKey):
            pair.endpoint.remote_memory(pair.there.address, pair.there.length, bad)
    await pair.endpoint.put(pair.here, 0, 64, pair.remote, 0, timeout_s=10)


async def test_message_over_the_limit_is_refused(pair: Pair) -> None:
    with pytest.raises(MessageTooLong):
        pair.endpoint.send(1, bytes(1025))


async def test_idle_worker_uses_no_processor(pair: Pair) -> None:
    """A worker with nothing to do sleeps: half a second of idleness costs less than a tenth of it."""
    import time

    await pair.endpoint.put(pair.here, 0, 64, pair.remote, 0, timeout_s=10)
    await asyncio.sleep(0.3)
    before = time.thread_time()
    await asyncio.sleep(0.5)
    assert time.thread_time() - before < 0.05


async def test_torch_memory_can_be_registered(pair: Pair) -> None:
    """A tensor's own memory is the source of a put."""
    torch = pytest.importorskip("torch")
    tensor = torch.arange(4096, dtype=torch.int32)
    memory = pair.endpoint.worker.context.register(tensor)
    await pair.endpoint.put(memory, 0, memory.length, pair.remote, 0, timeout_s=10)
    await pair.endpoint.flush(10)
    assert np.array_equal(pair.target[: memory.length].view(np.int32), tensor.numpy())
    memory.close()
    with pytest.raises(ValueError, match="contiguous"):
        pair.endpoint.worker.context.register(tensor.view(64, 64).t())
