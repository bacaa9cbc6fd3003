"""Hints of an application for a request, in `kv_transfer_params.quire`: what its prompt's blocks are wanted for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from quire.model.urgency import PRIORITY_MAX

HINTS: Final = "quire"
"""Name of the field in `kv_transfer_params`."""
SESSION_BYTES_MAX: Final = 256
_TIME_MAX: Final = 1e9
"""Seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """Hints of one request.

    Attributes:
        retain_s: Seconds for which the prompt is retained once the request is finished; 0 for none.
        priority: Of its loads, -10 to 10; None for that of the engine.
        prefetch_by_s: Seconds after its end at which the next request of the prompt comes, for example when a tool has
            answered; None for unknown.
        demote: The prompt is not wanted again soon: memory and drives may be given to others.
        session: Name of the conversation. Its retentions are its own: others neither shorten nor end them, and
            `demote` ends them.
        describe: The answer is to name the engine's blocks, for a router.
    """

    retain_s: float = 0.0
    priority: int | None = None
    prefetch_by_s: float | None = None
    demote: bool = False
    session: str = ""
    describe: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be done at the end of the request."""
        return not (self.retain_s or self.demote) and self.prefetch_by_s is None


def read_hints(parameters: Mapping[str, Any] | None) -> tuple[Hints, dict[str, Any]]:
    """Read the hints in a request's `kv_transfer_params`.

    Returns:
        The hints that are valid, and the invalid values by the name of their field.
    """
    hints = (parameters or {}).get(HINTS, {})
    if not isinstance(hints, Mapping):
        return Hints(), {HINTS: hints}
    values: dict[str, Any] = {}
    invalid: dict[str, Any] = {}
    for name, value in hints.items():
        check = _CHECKS.get(name)
        if check is not None and check(value):
            values[name] = value
        else:
            invalid[f"{HINTS}.{name}"] = value
    return Hints(**values), invalid


def _is_time(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value <= _TIME_MAX


def _is_priority(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int) and abs(value) <= PRIORITY_MAX


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_name(value: Any) -> bool:
    try:
        return isinstance(value, str) and 0 < len(value.encode()) <= SESSION_BYTES_MAX
    except UnicodeEncodeError:
        return False


_CHECKS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "retain_s": _is_time,
    "priority": _is_priority,
    "prefetch_by_s": _is_time,
    "demote": _is_flag,
    "session": _is_name,
    "describe": _is_flag,
}
