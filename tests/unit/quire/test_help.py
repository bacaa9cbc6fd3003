"""Every command explains itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from quire_tools.cli.app import _add_commands, app


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, found in getattr(command, "commands", {}).items():
        yield from _commands(found, (*path, name))


_add_commands(["bench", "plan"])


@pytest.mark.parametrize("path", list(_commands(typer.main.get_command(app))), ids=" ".join)
def test_help_is_printed(path: tuple[str, ...]) -> None:
    """`quire keys create --help` ended with a traceback: its help was read as markup."""
    done = CliRunner().invoke(app, [*path, "--help"])
    assert done.exit_code == 0, done.output
    assert "Usage" in done.output
    assert len(done.output.splitlines()) > 4
