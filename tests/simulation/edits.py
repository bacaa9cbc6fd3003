"""Changes of source text, for faults that are put back."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire_server.redis import scripts

_changed: dict[tuple[type, str], str] = {}


@dataclass(frozen=True, slots=True)
class Mutation:
    """`faults`: the bad days on which it shows; `found_by`: words of the check that finds it. `explored`: the
    scenario in which the exploration finds it, `tested`: the test that does, for one that the simulator need not find.
    `finding`: 0 for one that the exploration itself has found. `seed`: where the search begins, the seed that found it
    last.
    """

    finding: int
    what: str
    edits: tuple[Callable[[], None], ...]
    faults: tuple[str, ...] = ()
    found_by: str = ""
    explored: str = ""
    tested: str = ""
    reads_only: bool = False
    seed: int = 1

    def apply(self) -> None:
        for change in self.edits:
            change()


def edit(kind: type, method: str, old: str, new: str) -> Callable[[], None]:
    """Replace a piece of a method's source."""

    def apply() -> None:
        source = _changed.get((kind, method)) or textwrap.dedent(inspect.getsource(getattr(kind, method)))
        assert old in source, f"{kind.__name__}.{method} has no {old!r} any more"
        names: dict[str, Any] = {}
        source = _changed[kind, method] = source.replace(old, new)
        exec(source, vars(sys.modules[kind.__module__]), names)
        setattr(kind, method, names[method])

    return apply


def edit_function(plain: Callable[..., Any], old: str, new: str) -> Callable[[], None]:
    """Replace a piece of a function's source, wherever the function was imported."""

    def apply() -> None:
        source, names = inspect.getsource(plain), dict[str, Any]()
        assert old in source, f"{plain.__name__} has no {old!r} any more"
        exec(source.replace(old, new), vars(sys.modules[plain.__module__]), names)
        for module in list(sys.modules.values()):
            if getattr(module, plain.__name__, None) is plain:
                setattr(module, plain.__name__, names[plain.__name__])

    return apply


def edit_script(script: str, old: str, new: str) -> Callable[[], None]:
    """Replace a piece of a script of Redis."""

    def apply() -> None:
        plain = scripts.part
        assert old in plain(script), f"{script} has no {old!r} any more"

        def part(name: str) -> str:
            return plain(name).replace(old, new) if name == script else plain(name)

        scripts.part = part

    return apply
