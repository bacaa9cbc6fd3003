"""Enumerations whose members callers may name by a string."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from quire.model.errors import InvalidRequest

Kind = TypeVar("Kind", bound=Enum)


def choice(kind: type[Kind], value: Kind | str, field: str, error: type[InvalidRequest] = InvalidRequest) -> Kind:
    """Return a member by its name in any case; return a member unchanged.

    Args:
        kind: The enumeration.
        value: A member, or the name of one.
        field: Field that the error names.
        error: Type of the error.

    Raises:
        InvalidRequest: There is no such member; the message lists them.
    """
    if isinstance(value, kind):
        return value
    member = kind.__members__.get(value.upper()) if isinstance(value, str) else None
    if member is None:
        names = ", ".join(repr(name.lower()) for name in kind.__members__)
        raise error(f"{value!r}; there are {names}", field=field)
    return member
