"""What the residency machine answers, against what it was asked and what is there."""

from __future__ import annotations

from collections import Counter
from typing import Any

from quire.model.durability import Durability
from quire.model.errors import QuireError
from quire_storage.core.chunks import Copy
from quire_storage.core.residency import Residency
from quire_storage.core.residency import events as ev
from quire_storage.core.residency.entry import Entry, Phase
from quire_storage.errors import DriveFailed

_TOLD_LATER = (
    ev.PinnedAlso,
    ev.Unpinned,
    ev.ReservationEnded,
    ev.TransferUnsettled,
    ev.IndexingEnded,
    ev.Indexed,
    ev.PromotionEnded,
)
"""These have another event's ticket, and no answer."""


class Answers:
    """Each ticket has one answer at most, of the kind that its event promises. `before` an event, then `after` it."""

    def __init__(self, machine: Residency) -> None:
        self._machine = machine
        self._asked: dict[int, Any] = {}
        self._given: set[int] = set()
        self._registered: set[int] = set()
        self._at_once = self._newest = 0
        self._hits = Counter[str]()
        self._going = 0
        self._unclear: set[bytes] = set()
        self._evicted: tuple[int, int] = 0, 0
        self._answered: ev.Answered | None = None
        self._must_fail: set[int] = set()
        self._absent: set[bytes] = set()
        self._dropped: dict[int, set[bytes]] = {}
        self._promoted: list[Entry] = []

    def before(self, event: Any) -> None:
        machine = self._machine
        self._at_once, self._answered = 0, None
        self._unclear = {*machine.copies.leaving, *machine.copies.withdrawing}
        self._newest = machine.copies.last_number
        self._hits = machine.hits.copy()
        match event:
            case ev.Pinned(_, keys, True):
                self._hits.update(map(self._tier, keys))
            case ev.Denied(records):
                self._absent = {each.key for each in records if each.key not in machine.copies.entries} - set(
                    machine.keys()
                )
            case ev.Dropped(ticket, generations):
                self._dropped[ticket] = {key for key, which in generations.items() if self._goes(key, which)}
            case ev.Forgotten(removal, error) if error is not None:
                failed = {entry.number for entry in machine.departures.removals[removal]}
                self._must_fail |= {ticket for ticket, pending, _ in machine.departures.waits if failed & pending}
            case ev.WriteFailed(write, error) if write in machine.writes.rewrites and not isinstance(
                error, DriveFailed
            ):
                self._must_fail |= {goal.ticket for goal in machine.writes.rewrites[write][1]}
            case ev.IndexingEnded(ticket, error) if error is not None:
                self._must_fail.add(ticket)
            case ev.PromotionEnded(_, promotion, True):
                self._promoted = [entry for entry, _ in machine.promotions.running[promotion].places.values()]
        if isinstance(event, ev.Answered):
            entries = {entry.number: entry for entry in machine.eviction.questions[event.question].entries}.values()
            self._answered = event
            self._going = sum(
                entry.key in event.out and entry is machine.copies.entries.get(entry.key) for entry in entries
            )
            self._evicted = machine.evictions["disk"], machine.evictions["memory"]
        elif hasattr(event, "ticket") and not isinstance(event, _TOLD_LATER):
            assert event.ticket not in self._asked, "a ticket is used once"
            self._asked[event.ticket] = event
            self._at_once = event.ticket

    def after(self, event: Any, instructions: list[ev.Instruction]) -> None:
        """What an event did at once."""
        machine = self._machine
        assert +machine.hits == +self._hits, "each key that is asked for with a use counts, in the tier where it is"
        if isinstance(event, ev.Denied):
            told = {each.key for said in instructions if isinstance(said, ev.Withdraw) for each in said.records}
            assert self._absent <= told, "the index is told what is not here"
        if isinstance(event, ev.Dropped):
            left = [key for key in self._dropped[event.ticket] if key in machine]
            assert all(key in machine.copies.entries for key in left), "what ended is gone"
            assert all(machine.copies.entries[key].number > self._newest for key in left), "or was stored again at once"
        if isinstance(event, ev.RegistrationWanted) and (event.in_object or not event.within):
            assert not any(machine.generation(key) for key in self._registering(instructions)), "no entry lists it"
        if isinstance(event, ev.PromotionEnded) and event.complete:
            here = [entry for entry in self._promoted if entry.phase is Phase.RESIDENT]
            assert all(entry.memory is not None for entry in here), "every byte was read into memory, where it is now"
        if self._answered is not None:
            disk, memory = machine.evictions["disk"] - self._evicted[0], machine.evictions["memory"] - self._evicted[1]
            if machine.pool is not None:
                assert disk == self._going, f"{self._going} went, {disk} count"
            else:
                assert memory >= self._going, f"{self._going} went, {memory} count"
        for instruction in instructions:
            self._said(instruction)
        for waiting in machine.stores.offers.values():
            assert any(machine.copies.is_busy(chunk.key) for chunk in waiting.chunks), (
                "a store that waits, waits for something"
            )

    def _said(self, instruction: ev.Instruction) -> None:
        """One thing that is to be done."""
        machine = self._machine
        match instruction:
            case ev.Complete(ticket, value):
                self._give(ticket)
                assert ticket not in self._must_fail, "what failed is not told as done"
                self._check(self._asked[ticket], value)
            case ev.Fail(ticket, error):
                self._give(ticket)
                self._must_fail.discard(ticket)
                assert isinstance(error, QuireError) and error.message
                published = not isinstance(self._asked[ticket], ev.StoreOffered) or ticket in self._registered
                assert published or ticket not in machine.pins.holders, "a store that kept nothing holds nothing"
            case ev.Register(ticket, records, patient, _, within):
                asked = self._asked[ticket]
                self._registered.add(ticket)
                assert patient is getattr(asked, "patient", True)
                keys = asked.keys if isinstance(asked, ev.RegistrationWanted) else [c.key for c in asked.chunks]
                assert {record.key for record in records} <= set(keys)
                assert list(within) == [getattr(asked, "within", {}).get(record.key) for record in records if within]
            case ev.Upload(key, size, written):
                found = machine.look(key)
                assert found is None or size == found[0].chunk.shape.slot_bytes
                assert found is None or written == found[0].in_object, "whether there may be an object of it"
            case ev.AskToWithdraw(question, records, keepers):
                by = self._asked.get(machine.eviction.questions[question].ticket)
                assert records and keepers == (by.keepers if by is not None else ())
            case ev.AskToEvict(question, records):
                by = self._asked.get(machine.eviction.questions[question].ticket)
                assert records and (by is None or not by.keepers), "gone from everywhere, or from here only"
            case ev.WakeAt(at_s):
                assert at_s > machine.copies.now_s
            case ev.CancelUpload(key):
                assert machine.copies.objects and isinstance(key, bytes)
            case ev.Write(number, placed, sources):
                assert len({each.header.chunk.shape for each in placed}) == 1, "of one shape"
                begun = machine.writes.running.get(number)
                assert begun is None or not any(each.phase is Phase.LEAVING for each in begun.entries)
                assert len(sources) == len(placed)
            case ev.WriteHeaders() | ev.Forget():
                assert instruction.placed
            case ev.Withdraw(records):
                assert records
            case _:
                raise AssertionError(f"no instruction: {instruction}")

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
                named = asked.within
                listed = {key for key in keys if (has := machine.generation(key)) and has == named.get(key, has)}
                unclear = {*self._unclear, *machine.copies.leaving, *machine.copies.withdrawing}
                assert value <= set(keys), "of what was asked"
                if asked.ticket in machine.pins.holders:  # else its client has gone, and copies may have gone since
                    left_out = unclear if isinstance(asked, ev.StoreOffered) else set(keys)  # busy ones
                    assert value - listed <= unclear and listed - value <= left_out, "the keys that are indexed"
            case ev.LevelRaised():
                safe = {key for key in asked.keys if key in machine and self._is_safe(key, asked.level)}
                exact = at_once and not any(machine.copies.is_busy(key) for key in safe)
                assert set(value) <= safe and (not exact or set(value) == safe), "here, and on a drive if there is one"
            case ev.Pinned():
                copies: list[Copy] = value[0]
                assert [key for key in asked.keys if key not in value[1]] == [copy.chunk.key for copy in copies]
            case ev.Followed():
                mine = machine.memory.transfers.get(asked.transfer, set())
                must = {at for at, offset in enumerate(asked.offsets) if offset in mine}
                assert must <= set(value) <= set(range(len(asked.keys))), "what its store still has"
                held = machine.ledger.followed.get(asked.holder, ())
                assert {asked.offsets[at] for at in value} <= set(held), "stays until the holder lets go"
            case ev.PromotionWanted():
                assert value.keys() <= set(asked.numbers)
            case ev.EvictionWanted():
                assert value == (0 if self._answered is None else self._going), "how many went"
            case ev.Dropped():
                assert value == len(self._dropped[asked.ticket]), "how many went"
            case ev.Stopping():
                assert value is None
            case _:
                raise AssertionError(f"{asked} has no answer")

    def _tier(self, key: bytes) -> str:
        entry = self._machine.copies.entries.get(key)
        if key not in self._machine:
            return "object"
        return "memory" if entry is not None and entry.memory is not None else "disk"

    def _goes(self, key: bytes, generation: int) -> bool:
        """Whether a copy that is here was listed, or last listed, under the index entry that has ended."""
        return generation != 0 and self._machine.recorded(key) == generation

    def _registering(self, instructions: list[ev.Instruction]) -> list[bytes]:
        return [each.key for said in instructions if isinstance(said, ev.Register) for each in said.records]

    def _is_safe(self, key: bytes, level: Durability) -> bool:
        """On a drive if there is one, whose header says what a restart must know."""
        pool = self._machine.pool
        if pool is None:
            return True
        placed, off_drives = pool.get(key), {chunk.key for chunk in self._machine.off_drives()}
        if placed is None or key in off_drives:
            return False
        two = (Durability.REPLICATED, Durability.OBJECT)
        return level not in two or placed.header.level in two
