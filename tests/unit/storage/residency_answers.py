"""What the residency machine answers, against what it was asked and what is there."""

from __future__ import annotations

from typing import Any

from quire.model.errors import QuireError
from quire_storage.core import events as ev
from quire_storage.core.chunks import Copy
from quire_storage.core.residency import Residency

_TOLD_LATER = (ev.Unpinned, ev.ReservationEnded, ev.TransferUnsettled, ev.IndexingEnded, ev.Indexed, ev.PromotionEnded)
"""These have another event's ticket, and no answer."""


class Answers:
    """Each ticket has one answer at most, of the kind that its event promises. `before` an event, then `after` it."""

    def __init__(self, machine: Residency) -> None:
        self._machine = machine
        self._asked: dict[int, Any] = {}
        self._given: set[int] = set()
        self._at_once = 0
        self._hits = 0
        self._going = 0
        self._unclear: set[bytes] = set()
        self._evicted: tuple[int, int] = 0, 0
        self._answered: ev.Answered | None = None

    def before(self, event: Any) -> None:
        machine = self._machine
        self._at_once, self._answered = 0, None
        self._unclear = {*machine._leaving, *machine._withdrawing}
        self._hits = sum(machine.hits.values())
        if isinstance(event, ev.Answered):
            entries = {entry.number: entry for entry in machine._questions[event.question].entries}.values()
            self._answered = event
            self._going = sum(entry.key in event.out and entry is machine._entries.get(entry.key) for entry in entries)
            self._evicted = machine.evictions["disk"], machine.evictions["memory"]
        elif hasattr(event, "ticket") and not isinstance(event, _TOLD_LATER):
            assert event.ticket not in self._asked, "a ticket is used once"
            self._asked[event.ticket] = event
            self._at_once = event.ticket

    def after(self, event: Any, instructions: list[ev.Instruction]) -> None:
        """What an event did at once."""
        machine = self._machine
        if isinstance(event, ev.Pinned):
            assert sum(machine.hits.values()) - self._hits == (len(event.keys) if event.used else 0), "each key counts"
        if self._answered is not None:
            disk, memory = machine.evictions["disk"] - self._evicted[0], machine.evictions["memory"] - self._evicted[1]
            if machine.pool is not None:
                assert disk == self._going, f"{self._going} went, {disk} count"
            else:
                assert memory >= self._going, f"{self._going} went, {memory} count"
        for instruction in instructions:
            match instruction:
                case ev.Complete(ticket, value):
                    self._give(ticket)
                    self._check(self._asked[ticket], value)
                case ev.Fail(ticket, error):
                    self._give(ticket)
                    assert isinstance(error, QuireError) and error.message
                case ev.Register(ticket, records, patient):
                    asked = self._asked[ticket]
                    assert patient is getattr(asked, "patient", True)
                    keys = asked.keys if isinstance(asked, ev.RegistrationWanted) else [c.key for c in asked.chunks]
                    assert {record.key for record in records} <= set(keys)
                case ev.Upload(key, size, written):
                    found = machine.look(key)
                    assert found is None or size == found[0].chunk.shape.slot_bytes
                    assert isinstance(written, bool)
                case ev.AskToWithdraw(_, records, others_min):
                    assert isinstance(others_min, int) and records
                case ev.WakeAt(at_s):
                    assert at_s > machine._now_s
                case ev.CancelUpload(key):
                    assert machine._objects and isinstance(key, bytes)
                case ev.Write() | ev.WriteHeaders() | ev.Forget():
                    assert instruction.placed
                case ev.Withdraw(records) | ev.AskToEvict(_, records):
                    assert records
                case ev.Fetch(keys):
                    assert machine._objects and not any(key in machine for key in keys)
                case _:
                    raise AssertionError(f"no instruction: {instruction}")
        for waiting in machine._offers.values():
            assert any(machine._is_busy(chunk.key) for chunk in waiting.chunks), (
                "a store that waits, waits for something"
            )

    def _give(self, ticket: int) -> None:
        assert ticket in self._asked and ticket not in self._given, "what was asked is answered once"
        self._given.add(ticket)

    def _check(self, asked: Any, value: Any) -> None:
        machine, at_once = self._machine, asked.ticket == self._at_once
        match asked:
            case ev.Reserved():
                assert len(set(value)) == len(value) == asked.count
            case ev.StoreOffered() | ev.RegistrationWanted():
                keys = asked.keys if isinstance(asked, ev.RegistrationWanted) else [each.key for each in asked.chunks]
                listed = {key for key in keys if machine.generation(key)}
                unclear = {*self._unclear, *machine._leaving, *machine._withdrawing}
                # What was busy when it was asked is left out, and what went when its client had.
                exact = isinstance(asked, ev.StoreOffered) and asked.ticket in machine._holders
                left_out = unclear if exact else set(keys)
                assert value <= set(keys), "of what was asked"
                assert value - listed <= unclear and listed - value <= left_out, "the keys that are indexed"
            case ev.LevelRaised():
                safe = {key for key in asked.keys if key in machine and self._is_safe(key)}
                assert set(value) <= safe and (not at_once or set(value) == safe), (
                    "here, and on a drive if there is one"
                )
            case ev.Pinned():
                copies: list[Copy] = value[0]
                assert [key for key in asked.keys if key not in value[1]] == [copy.chunk.key for copy in copies]
            case ev.PromotionWanted():
                assert value.keys() <= set(asked.numbers)
            case ev.EvictionWanted():
                assert value == (0 if self._answered is None else self._going), "how many went"
            case ev.Dropped():
                assert 0 <= value <= len(asked.generations)
            case ev.Stopping():
                assert value is None
            case _:
                raise AssertionError(f"{asked} has no answer")

    def _is_safe(self, key: bytes) -> bool:
        pool = self._machine.pool
        return pool is None or (key in pool and key not in {chunk.key for chunk in self._machine.off_drives()})
