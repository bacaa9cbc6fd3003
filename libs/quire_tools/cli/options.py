"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer

from quire.model.errors import InvalidRequest

FOLDER: Final = Path("quire-data")
Folder = Annotated[Path, typer.Option(help="where the cluster keeps its files")]
Gateway = Annotated[str, typer.Option(help="host:port of a gateway; empty for the cluster on --folder")]
Admin = Annotated[str, typer.Option(help="host:port of a gateway's admin frontend; empty for the cluster on --folder")]
AsJson = Annotated[bool, typer.Option("--json", help="for a program")]
Json = Annotated[Path | None, typer.Option("--json", help="write the result there")]
Plot = Annotated[Path | None, typer.Option("--plot", help="draw the result there (PNG)")]
Number = TypeVar("Number", int, float)


def numbers(text: str, kind: Callable[[str], Number]) -> list[Number]:
    """Read an option that takes several numbers, separated by commas.

    Raises:
        InvalidRequest: A part is no number of that kind.
    """
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise InvalidRequest(f"{text!r} is no list of numbers") from None


def salt_of(text: str) -> bytes:
    """Read an option that takes a tenant's salt.

    Raises:
        InvalidRequest: It is not hexadecimal.
    """
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidRequest("not hexadecimal", field="tenant-salt") from None
