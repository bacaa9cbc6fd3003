"""Restarts services that end: soon at first, later if they keep ending."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

_SOON_S: Final = 0.5
_LATE_S: Final = 30.0
_WELL_S: Final = 60.0
"""A service that ran for so long is well: the next time it is started again soon."""


class Processes(Protocol):
    """See `LocalCluster`."""

    def ended(self) -> dict[str, int]: ...
    def start_again(self, name: str) -> None: ...
    def last_words(self, name: str) -> str: ...


@dataclass(slots=True)
class _Trouble:
    seen_s: float
    wait_s: float = _SOON_S
    started_s: float | None = None


class Supervisor:
    """`look` again and again. `say`: called with each service that ended, and each that was restarted."""

    def __init__(self, processes: Processes, say: Callable[[str], None]) -> None:
        self._processes = processes
        self._say = say
        self._troubles: dict[str, _Trouble] = {}

    def look(self, now_s: float) -> None:
        for name, status in self._processes.ended().items():
            trouble = self._troubles.get(name)
            if trouble is None or trouble.started_s is not None:
                trouble = self._troubles[name] = self._next(trouble, now_s)
                self._say(f"{name} ended with status {status}; it is started again in {trouble.wait_s:g} s")
                if words := self._processes.last_words(name):
                    self._say(f"  {words}")
            if now_s >= trouble.seen_s + trouble.wait_s:
                self._processes.start_again(name)
                trouble.started_s = now_s
                self._say(f"{name} was started again")

    def _next(self, previous: _Trouble | None, now_s: float) -> _Trouble:
        if previous is None or previous.started_s is None or now_s - previous.started_s >= _WELL_S:
            return _Trouble(now_s)
        return _Trouble(now_s, min(_LATE_S, 2 * previous.wait_s))
