"""The port for copies between an engine's memory and host memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from quire.transport.devices import CopyStream, Event

_ROWS, _ROW_BYTES = 64, 64 << 10
_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine: `memory`, a tensor of (rows, bytes); `begin` its work on its stream; `end` when that has run."""

    copies: CopyStream
    memory: Any
    begin: Callable[[Callable[[], None]], None]
    end: Callable[[], None]


class CopyStreamContract:
    """Fixture `engine`: an `Engine` whose memory is zeros."""

    @pytest.fixture
    def staging(self, engine: Engine) -> Any:
        """Fixture: a tensor of pinned host memory of the engine's memory's size, random."""
        import torch

        memory = np.random.default_rng(1).integers(1, 256, (_ROWS, _ROW_BYTES), dtype=np.uint8)
        engine.copies.pin(memory.reshape(-1))
        return torch.from_numpy(memory)

    def test_a_copy_reads_what_the_engine_wrote_before(self, engine: Engine, staging: Any) -> None:
        engine.begin(partial(engine.memory.fill_, 7))
        copied = engine.copies.submit(lambda: _copy(staging, engine.memory), dependency=engine.copies.record())
        copied.synchronize()
        assert (staging == 7).all() and copied.query()

    def test_the_engine_reads_what_was_copied_before(self, engine: Engine, staging: Any) -> None:
        """The engine's work is ordered behind the copy, and nothing else waits."""
        read = engine.memory.clone()
        engine.copies.order(engine.copies.submit(lambda: _copy(engine.memory, staging)))
        engine.begin(lambda: _copy(read, engine.memory))
        engine.end()
        assert (read.cpu() == staging).all()

    def test_an_event_has_passed_when_its_copies_have_run(self, engine: Engine, staging: Any) -> None:
        copied = engine.copies.submit(lambda: _copy(engine.memory, staging))
        _poll(copied)
        assert (engine.memory.cpu() == staging).all()

    def test_copies_run_in_their_order(self, engine: Engine, staging: Any) -> None:
        engine.copies.submit(lambda: _copy(engine.memory, staging))
        engine.copies.submit(partial(engine.memory[: _ROWS // 2].fill_, 3)).synchronize()
        assert (engine.memory[: _ROWS // 2] == 3).all()
        assert (engine.memory[_ROWS // 2 :].cpu() == staging[_ROWS // 2 :]).all()

    def test_staging_memory_is_free_behind_the_event(self, engine: Engine, staging: Any) -> None:
        expected = staging.clone()
        engine.copies.submit(lambda: _copy(engine.memory, staging)).synchronize()
        staging.fill_(0)
        engine.end()
        assert (engine.memory.cpu() == expected).all()

    def test_the_engine_may_overwrite_what_is_copied_out(self, engine: Engine, staging: Any) -> None:
        """The engine's later work is ordered behind the copy, as when blocks are used again."""
        engine.begin(partial(engine.memory.fill_, 5))
        copied = engine.copies.submit(lambda: _copy(staging, engine.memory), dependency=engine.copies.record())
        engine.copies.order(copied)
        engine.begin(partial(engine.memory.fill_, 9))
        engine.end()
        _poll(copied)
        assert (staging == 5).all() and (engine.memory == 9).all()


def _copy(into: Any, out_of: Any) -> None:
    into.copy_(out_of, non_blocking=True)


def _poll(event: Event) -> None:
    until_s = time.monotonic() + _LIMIT_S
    while not event.query():
        assert time.monotonic() < until_s, "the copies have not run"
