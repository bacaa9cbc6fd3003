"""Whose a buffer is while it is not known which nodes write to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from quire.client import AsyncClient
from quire.client.delivery import Delivery
from quire.client.memory.buffers import Buffer
from quire.client.retrieval import first_of, retrieved
from quire.model.errors import DeadlineExceeded, NodeUnavailable, NotAllowed, QuireError
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.transport.memory import MemoryTransport
from quire.wire.channels import Stop
from quire_tools.local.ports import free_ports


async def _retrieve(error: QuireError, *, answered: bool) -> tuple[Buffer, Delivery]:
    """A retrieval whose first answer is an error, or never comes."""
    error.answered = answered

    async def answers() -> AsyncGenerator[Any, None]:
        raise error
        yield

    transport = MemoryTransport()
    await transport.start()
    buffer = Buffer.allocate(transport, 4096)
    delivery = Delivery(
        transfer_id=b"d" * 16,
        num_layers=2,
        buffer=buffer,
        loan=buffer.lend_range("delivery", 4096),
        transport=transport,
        on_quiesced=lambda: None,
        transfer_s=60.0,
    )
    found = asyncio.get_running_loop().create_future()
    never: Any = None
    delivery.start(retrieved(answers(), delivery, 0, never, found), Stop())
    with pytest.raises(type(error)):
        await first_of(found, delivery, 0)
    return buffer, delivery


async def test_what_the_gateway_refuses_gives_the_buffer_back() -> None:
    """It tells its client of the nodes before it asks them."""
    buffer, delivery = await _retrieve(NotAllowed("no"), answered=True)
    assert not buffer.is_busy
    await delivery.quiesced(1)
    buffer.close()


@pytest.mark.parametrize("error", [NodeUnavailable("the gateway went away"), DeadlineExceeded("no answer")])
async def test_an_answer_that_was_lost_keeps_the_buffer_lent(
    error: QuireError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes may be writing; it comes back when no permit can be used any more."""
    later: list[Callable[[], None]] = []
    monkeypatch.setattr("quire.client.delivery.when_unheard", lambda transfer_s, then: later.append(then))
    buffer, delivery = await _retrieve(error, answered=False)
    assert buffer.is_busy
    with pytest.raises(DeadlineExceeded):
        await delivery.quiesced(0.01)
    waiting = asyncio.create_task(delivery.quiesced(60.0))
    await asyncio.sleep(0.05)
    assert not waiting.done(), "it waits, and does not say at once that it may not be used"
    (no_permit_is_good_any_more,) = later
    no_permit_is_good_any_more()
    assert not buffer.is_busy
    await waiting
    buffer.close()


@pytest.mark.parametrize("what", ["retrieve", "store"])
@pytest.mark.parametrize("session", [True, False])
async def test_what_never_left_this_process_gives_the_buffer_back(
    what: str, session: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No gateway listens."""

    async def there() -> None:
        """As it was found to be before the gateway went away."""

    namespace = Namespace("m", "w", KvLayout(1, 16, 1, 16, Dtype.FP16))
    keys = ChunkKeys(bytes(range(32)))
    (port,) = free_ports(1)
    client = AsyncClient(f"127.0.0.1:{port}", transport=MemoryTransport(), timeout_s=30, session=session)
    await client.start()
    monkeypatch.setattr(client, "reach", there)
    buffer = client.allocate(4096)
    with pytest.raises(QuireError) as refused:
        if what == "retrieve":
            await client.retrieve(namespace, keys, buffer)
        else:
            await client.store(namespace, keys, 0, buffer, complete=True)
    assert refused.value.unsent and not buffer.is_busy
    await client.close()
