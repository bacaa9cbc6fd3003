"""The page of the residency machine, drawn from what the machine does: random histories are run on the node of its
tests, and what each event changed, and asked for, is noted.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Final, get_args

from quire.model.durability import Durability
from quire_storage.core import residency
from quire_storage.core.residency import Residency, events
from quire_storage.core.residency.copies import Copies
from quire_storage.core.residency.entry import Entry, Phase
from tests.unit.storage.residency_histories import History
from tests.unit.storage.residency_world import World

_GONE: Final = "gone"
_ORDER: Final = (_GONE, *(phase.name.lower() for phase in Phase))
_HISTORIES: Final = 300
_FIGURE: Final = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 160" font-family="sans-serif" font-size="14">
<style>
path {{ fill: none; stroke: #4878a8; stroke-width: 1.5 }}
rect {{ fill: #eef3f8; stroke: #4878a8 }}
text {{ text-anchor: middle; fill: #333 }}
.end {{ fill: #4878a8 }}
</style>
<defs><marker id="to" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">
<polygon points="0,0 8,4 0,8" fill="#4878a8"/></marker></defs>
<rect width="860" height="160" style="fill: #fff; stroke: none"/>
{parts}
</svg>
"""
_PAGE: Final = """\
# The residency machine

{about}

![Copies arrive, are resident, leave, and are gone](figures/residency.svg)

| | a copy that was | is then | at |
| --- | --- | --- | --- |
{edges}

Each edge was seen in random histories, at the events that it names. What an event makes possible happens with it: a
store that waited for the index to forget a chunk is taken at `Withdrawn`, so a copy may begin to arrive there.

## Events

| event | | asks for |
| --- | --- | --- |
{events}

## Instructions

| instruction | |
| --- | --- |
{instructions}
"""


_BOXES: Final = {"": 40, "arriving": 200, "resident": 420, "leaving": 640, _GONE: 820}
"""Middles, from left to right; copies come in at the left."""


def page() -> str:
    seen, edges = _watched()
    rows = [f"| {at} | {_was(a)} | {b} | {', '.join(edges[a, b])} |" for at, (a, b) in enumerate(edges, 1)]
    return _PAGE.format(
        about=inspect.cleandoc(residency.__doc__ or ""),
        edges="\n".join(rows),
        events="\n".join(f"| `{name}` | {_said(name)} | {_list(seen.asked[name])} |" for name in _names(events.Event)),
        instructions="\n".join(f"| `{name}` | {_said(name)} |" for name in _names(events.Instruction)),
    )


def figure() -> str:
    """The phases and the numbered edges between them, as SVG."""
    parts = []
    for at, (before, after) in enumerate(_watched()[1], 1):
        left, right = _BOXES["" if before == _GONE else before], _BOXES[after]
        steps = list(_BOXES).index(after) - list(_BOXES).index("" if before == _GONE else before)
        left, right = left + (8 if before == _GONE else 50), right - (8 if after == _GONE else 50)
        rise = 0 if steps == 1 else 34 * steps
        parts.append(
            f'<path d="M{left},130 Q{(left + right) // 2},{130 - 2 * rise} {right},130" marker-end="url(#to)"/>'
        )
        parts.append(f'<text x="{(left + right) // 2}" y="{124 - rise}">{at}</text>')
    for name, x in _BOXES.items():
        if name in ("", _GONE):
            parts.append(f'<circle cx="{x}" cy="130" r="{6 if name else 4}" class="end"/>')
        else:
            parts.append(
                f'<rect x="{x - 50}" y="112" width="100" height="36" rx="8"/><text x="{x}" y="135">{name}</text>'
            )
    return _FIGURE.format(parts="\n".join(parts))


@cache
def _watched() -> tuple[_Seen, dict[tuple[str, str], list[str]]]:
    """What histories showed, and the edges of it: at which events a copy goes from one phase to another."""
    seen = _Seen()
    with seen.watching():
        for seed in range(_HISTORIES):
            History(seed).run()
    edges: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in _names(events.Event):
        for edge in seen.changes[name]:
            edges[edge].append(name)
    drawn = sorted(edges, key=lambda edge: (_ORDER.index(edge[0]), _ORDER.index(edge[1])))
    return seen, {edge: edges[edge] for edge in drawn}


class _Seen:
    """`changes`: (from, to) of a copy, by event; `asked`: instructions, by event."""

    def __init__(self) -> None:
        self.changes: dict[str, set[tuple[str, str]]] = defaultdict(set)
        self.asked: dict[str, set[str]] = defaultdict(set)
        self._event = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what every machine does meanwhile. Its own checks are for tests, and are left out."""
        patched: list[tuple[type, str, Any]] = [
            (Residency, "handle", self._handle(Residency.handle)),
            (Copies, "add", self._add(Copies.add)),
            (World, "check", lambda world: None),
            (Entry, "phase", self._phase(Entry.__dict__["phase"])),
        ]
        before = [(kind, name, kind.__dict__[name]) for kind, name, _ in patched]
        try:
            for kind, name, value in patched:
                setattr(kind, name, value)
            yield
        finally:
            for kind, name, value in before:
                setattr(kind, name, value)

    def _handle(self, handle: Any) -> Any:
        def watched(machine: Residency, event: Any, now_s: float) -> Any:
            self._event, copies = type(event).__name__, dict(machine.copies.by_number)
            out = handle(machine, event, now_s)
            self.asked[self._event] |= {type(each).__name__ for each in out}
            for number, copy in copies.items():
                on_a_drive_alone = copy.phase is Phase.RESIDENT and copy.disk is not None
                if number not in machine.copies.by_number and not on_a_drive_alone:
                    self._note(copy.phase, None)
            return out

        return watched

    def _add(self, add: Any) -> Any:
        def watched(copies: Copies, chunk: Any, level: Durability, phase: Phase) -> Any:
            on_a_drive_alone = copies.pool is not None and chunk.key in copies.pool and chunk.key not in copies.leaving
            if not (on_a_drive_alone and phase is Phase.RESIDENT):
                self._note(None, phase)
            return add(copies, chunk, level, phase)

        return watched

    def _phase(self, slot: Any) -> property:
        def moved(copy: Entry, to: Phase) -> None:
            with suppress(AttributeError):  # it is being made
                self._note(slot.__get__(copy), to)
            slot.__set__(copy, to)

        return property(slot.__get__, moved)

    def _note(self, before: Phase | None, after: Phase | None) -> None:
        if before is not after:
            self.changes[self._event].add(
                (_GONE if before is None else before.name.lower(), _GONE if after is None else after.name.lower())
            )


def _names(union: Any) -> list[str]:
    return [each.__name__ for each in get_args(union)]


def _was(name: str) -> str:
    return "not there" if name == _GONE else name


def _said(name: str) -> str:
    """The first paragraph of its docstring."""
    text = inspect.cleandoc(getattr(events, name).__doc__ or "").partition("\n\n")[0]
    return " ".join(text.split()).replace("|", "\\|")


def _list(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in _names(events.Instruction) if name in names)
