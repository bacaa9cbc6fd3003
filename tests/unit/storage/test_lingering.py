"""Deliveries whose last bytes could not be settled in time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quire.model.errors import DeadlineExceeded
from quire.transport import Quiesced, decode_message
from quire_storage.delivery.delivery import NodeDelivery


class _Parts:
    """Stream, batches and target of such a delivery: the stream settles at the third attempt."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    async def drain(self, timeout_s: float) -> None:
        self.steps.append("drained")
        if len(self.steps) < 3:
            raise DeadlineExceeded("puts are in flight")

    def target_closed(self) -> None:
        self.steps.append("target closed")

    async def batches_closed(self) -> None:
        self.steps.append("batches closed")

    def connect(self, address: bytes) -> Any:
        assert address == b"client"
        return SimpleNamespace(send=self._send)

    def _send(self, message: bytes) -> None:
        quiesced = decode_message(message)
        assert isinstance(quiesced, Quiesced)
        self.steps.append(f"quiesced {quiesced.transfer_id.decode()} {quiesced.node_index}")


async def test_the_client_gets_quiesced_when_nothing_is_in_flight() -> None:
    """Finding D10: its memory stayed lent for 51 minutes. After everything is closed here, not before."""
    parts, delivery = _Parts(), object.__new__(NodeDelivery)
    target = SimpleNamespace(worker_address=b"client")
    call = SimpleNamespace(delivery_id=b"d" * 16, node_index=3, descriptor=SimpleNamespace(target=target))
    vars(delivery).update(
        settled=False,
        _left=(parts, SimpleNamespace(close=parts.batches_closed), SimpleNamespace(close=parts.target_closed)),
        _parts=SimpleNamespace(transport=parts),
        _call=call,
    )
    await delivery.linger()
    assert delivery.settled
    assert parts.steps == ["drained"] * 3 + ["target closed", "batches closed", f"quiesced {'d' * 16} 3"]
