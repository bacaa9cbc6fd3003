"""Every command explains itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from click.testing import CliRunner

from quire_tools.cli.app import app
from quire_tools.cli.bench_app import GROUPS, load_commands


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, found in getattr(command, "commands", {}).items():
        yield from _commands(found, (*path, name))


for _group in GROUPS:
    load_commands(_group)
COMMANDS: Any = typer.main.get_command(app)


@pytest.mark.parametrize("path", list(_commands(COMMANDS)), ids=" ".join)
def test_help_is_printed(path: tuple[str, ...]) -> None:
    """`quire keys create --help` ended with a traceback: its help was read as markup."""
    done = CliRunner().invoke(COMMANDS, [*path, "--help"])
    assert done.exit_code == 0, done.output
    assert "Usage" in done.output
    assert len(done.output.splitlines()) > 4


@pytest.mark.parametrize("path", list(_commands(COMMANDS)), ids=" ".join)
def test_every_option_is_explained(path: tuple[str, ...]) -> None:
    command = COMMANDS
    for name in path:
        command = command.commands[name]
    assert command.help, path
    assert not [each.name for each in command.params if not each.help and not each.hidden and each.name != "help"]
