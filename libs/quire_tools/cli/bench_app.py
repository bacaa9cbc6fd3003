"""`quire bench` and `quire plan`; those of entry points are loaded when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Annotated, Final

import typer

from quire.model.errors import ConfigInvalid
from quire_tools.cli.options import Json, Plot

bench_app = typer.Typer()
plan_app = typer.Typer(no_args_is_help=True, help="What a deployment needs and costs, before there is one.")


@plan_app.callback()
def plan() -> None:
    """Plan a deployment: its needs and costs."""


@bench_app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    rounds: Annotated[int, typer.Option(help="of each, without a name")] = 5,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Run benchmarks of the distribution quire-bench: a table, --json FILE, --plot FILE.png, each with its baseline.

    Without a name, several in short.

    Transfers are between hosts, unless an option says otherwise.
    """
    os.environ["QUIRE_SHARED_MEMORY"] = "off"
    if context.invoked_subcommand is None:
        overviews = list(entry_points(group="quire.bench-overview"))
        if not overviews:
            raise ConfigInvalid(_NOT_INSTALLED)
        overviews[0].load()(rounds).show(json_file, plot)


_NOT_INSTALLED: Final = "the benchmarks are not installed: pip install quire-bench"
GROUPS: Final = {"bench": bench_app, "plan": plan_app}


def load_commands(group: str, words: Sequence[str] = ()) -> None:
    """Benchmarks or plans of `entry_points`: the one that `words` (behind the group's name) begin with, or all."""
    commands, named = GROUPS[group], next((word for word in words if not word.startswith("-")), "")
    if named in {command.name for command in commands.registered_commands}:
        return
    entries = sorted(entry_points(group=f"quire.{group}"), key=lambda entry: entry.name)
    if named and not entries:
        raise ConfigInvalid(_NOT_INSTALLED)
    for entry in [candidate for candidate in entries if candidate.name == named] or entries:
        try:
            command = entry.load()
        except ModuleNotFoundError as error:
            if entry.name == named:
                raise
            command = _lacking(str(error.name))
        commands.command(entry.name)(command)


def _lacking(module: str) -> Callable[[], None]:
    """Replace a command whose packages are not installed: the help of all commands names it."""

    def command() -> None:
        raise ModuleNotFoundError(name=module)

    command.__doc__ = f"Needs {module}, which the extra `tools` of Quire brings."
    return command
