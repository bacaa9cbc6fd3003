"""Feeds events to the residency machine, and carries out its instructions.

These concern the ring, the index and the object tier. Decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import numpy as np

from quire.model.errors import InternalError, QuireError
from quire.model.records import ChunkRecord
from quire.telemetry import background, counter, logger, names
from quire_storage.cluster.registry import Registry
from quire_storage.core.residency import Residency
from quire_storage.core.residency import events as ev
from quire_storage.core.residency.invariants import check
from quire_storage.errors import DriveFailed
from quire_storage.ports import Clock
from quire_storage.tiers.arena import Arena
from quire_storage.tiers.pool import Pool
from quire_storage.tiers.write_behind import WriteBehind

_TIERS: Final = tuple({"tier": tier} for tier in ("memory", "disk", "object"))


class Executor:
    """Executor for one event loop. `checked`: number of events between checks of the machine's invariants (tests)."""

    def __init__(
        self,
        *,
        residency: Residency,
        arena: Arena,
        pool: Pool | None,
        write_behind: WriteBehind | None,
        registry: Registry,
        clock: Clock,
        checked: int,
    ) -> None:
        self._residency = residency
        self._arena = arena
        self._pool = pool
        self._write_behind = write_behind
        self._registry = registry
        self._clock = clock
        self._checked = checked
        self._posted = 0
        self._tickets = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._hits = counter(names.TIER_HITS, "1", "chunks asked for, by where they were", _TIERS)
        self._evictions = counter(names.EVICTIONS, "1", "chunks that went", _TIERS[:2])
        self._counted: dict[str, dict[str, int]] = {"hits": {}, "evictions": {}}

    async def close(self) -> None:
        """End the instructions that are being carried out."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- events

    def post(self, event: ev.Event) -> None:
        """Post an event, and start the instructions that follow."""
        for instruction in self._residency.handle(event, self._clock.monotonic_s()):
            self._carry_out(instruction)
        self._posted += 1
        if self._checked and self._posted % self._checked == 0:
            check(self._residency)

    def ticket(self) -> int:
        """Return a new ticket: its request is answered under it."""
        self._tickets += 1
        return self._tickets

    async def ask(self, event: Callable[[int], ev.Event]) -> object:
        """Post `event(ticket)`, and wait for its answer."""
        ticket = self.ticket()
        return await self.answer(ticket, event(ticket))

    async def answer(self, ticket: int, event: ev.Event) -> object:
        """Post an event, and wait until its ticket is completed. Raises what the machine fails it with."""
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = answer
        try:
            self.post(event)
            return await answer
        finally:
            self._waiting.pop(ticket, None)

    def answered_at_once(self, ticket: int, event: ev.Event) -> object:
        """The same for an event that the machine answers while it handles it."""
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = answer
        try:
            self.post(event)
        finally:
            del self._waiting[ticket]
        return answer.result()

    def _resolve(self, ticket: int, value: object, error: QuireError | None) -> None:
        answer = self._waiting.get(ticket)
        if answer is None or answer.done():
            return  # the one who asked has gone
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)

    # ---- instructions

    def _carry_out(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Complete(ticket, value):
                self._resolve(ticket, value, None)
            case ev.Fail(ticket, error):
                self._resolve(ticket, None, error)
            case ev.Write() | ev.WriteHeaders():
                self._spawn(self._write(instruction))
            case ev.Forget(removal, placed):
                self._spawn(self._forget(ev.Forget(removal, placed)))
            case ev.Register():
                self._spawn(self._register(instruction))
            case ev.Withdraw(records, hidden):
                self._spawn(self._withdraw(records, hidden))
            case ev.AskToEvict() | ev.AskToWithdraw():
                self._spawn(self._question(instruction))
            case ev.Upload(key, size, written):
                assert self._write_behind is not None, "the machine knows that there is an object tier"
                self._write_behind.enqueue(key, size, written=written)
            case ev.CancelUpload(key):
                assert self._write_behind is not None, "the machine knows that there is an object tier"
                self._write_behind.forget(key)
            case ev.WakeAt(at_s):
                delay_s = max(0.0, at_s - self._clock.monotonic_s())
                self._spawn(self._wake(delay_s))

    async def _write(self, instruction: ev.Write | ev.WriteHeaders) -> None:
        assert self._pool is not None, "the machine knows that there are drives"
        try:
            if isinstance(instruction, ev.WriteHeaders):
                await self._pool.rewrite(instruction.placed)
            else:
                places = instruction.sources
                addresses = np.array([place.offset for place in places], dtype=np.int64) + self._arena.address
                strides = np.array([place.layer_stride for place in places], dtype=np.int64)
                await self._pool.write(instruction.placed, addresses, strides)
        except Exception as error:
            self.post(ev.WriteFailed(instruction.write, _failure(error)))
        else:
            self.post(ev.Written(instruction.write))

    async def _forget(self, instruction: ev.Forget) -> None:
        assert self._pool is not None, "the machine knows that there are drives"
        try:
            await self._pool.forget(instruction.placed)
        except Exception as error:
            self.post(ev.Forgotten(instruction.removal, _failure(error)))
        else:
            self.post(ev.Forgotten(instruction.removal))

    async def _register(self, request: ev.Register) -> None:
        registry, failure = self._registry, None
        try:
            if request.within:
                generations = await registry.joining(request.records, request.within, only_in_object=request.in_object)
                self.post(ev.Indexed(request.ticket, generations))
            else:
                patient, fresh = request.patient, request.generation
                async for part in registry.registering(request.records, patient=patient, fresh=fresh):
                    self.post(ev.Indexed(request.ticket, part))
        except Exception as error:
            failure = _failure(error)
        self.post(ev.IndexingEnded(request.ticket, failure))

    async def _withdraw(self, records: Sequence[ChunkRecord], hidden: bool) -> None:
        try:
            await self._registry.withdraw(records, hidden=hidden)
        except Exception as error:
            _failure(error)  # the index lists them on, and the next comparison of listings shows it
        self.post(ev.Withdrawn([record.key for record in records]))

    async def _question(self, instruction: ev.AskToEvict | ev.AskToWithdraw) -> None:
        out: set[bytes] | None = None
        try:
            if isinstance(instruction, ev.AskToEvict):
                out = await self._registry.may_go(instruction.records)
            else:
                out = await self._registry.may_withdraw(instruction.records, instruction.keepers)
        except Exception as error:
            _failure(error)  # without an answer nothing goes
        self.post(ev.Answered(instruction.question, frozenset(out or ()), refused=out is not None))
        self.count()

    async def _wake(self, delay_s: float) -> None:
        await self._clock.sleep(delay_s)
        self.post(ev.TimePassed())

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine, context=background())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def count(self) -> None:
        """Publish hits and evictions by tier."""
        for name, current, metric in (
            ("hits", self._residency.hits, self._hits),
            ("evictions", self._residency.evictions, self._evictions),
        ):
            previous = self._counted[name]
            for tier, count in current.items():
                if count != previous.get(tier, 0):
                    metric.add(count - previous.get(tier, 0), {"tier": tier})
                    previous[tier] = count


def _failure(error: Exception) -> QuireError:
    """Return the error for the machine: an instruction always ends. Unexpected ones are logged."""
    if not isinstance(error, DriveFailed):
        logger().error("an instruction failed unexpectedly", exc_info=error)
    return error if isinstance(error, QuireError) else InternalError(f"{type(error).__name__}: {error}")
