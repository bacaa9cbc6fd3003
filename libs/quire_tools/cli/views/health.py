"""`quire health`: the verdict on a cluster, and what to do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from quire.model.errors import QuireError
from quire.model.health import Check, Verdict, unreachable, verdict_of
from quire_tools.cli.cluster import looking

_STYLES = {Verdict.OK: "bold green", Verdict.WARN: "bold yellow", Verdict.ERR: "bold red"}
console = Console()


def health(folder: Path, gateway: str, admin: str, timeout_s: float, *, as_json: bool) -> Verdict:
    """Print the verdict and the failed checks, and return the verdict; a cluster that cannot be asked is `ERR`."""
    try:
        with looking(folder, gateway, admin, timeout_s=timeout_s) as look:
            failed = list(look.health())
    except QuireError as error:
        failed = [unreachable(f"{error.code()}: {error}")]
    if as_json:
        print(json.dumps(plain(failed), indent=2))
    else:
        show(failed)
    return verdict_of(failed)


def plain(failed: Sequence[Check]) -> dict[str, object]:
    """Return the verdict for a program."""
    checks = [{**check._asdict(), "verdict": check.verdict.name} for check in failed]
    return {"verdict": verdict_of(failed).name, "checks": checks}


def show(failed: Sequence[Check]) -> None:
    """Print the verdict, and a line with advice for each failed check."""
    verdict = verdict_of(failed)
    console.print(verdict.name, style=_STYLES[verdict])
    for check in failed:
        where = f"{check.node}: " if check.node else ""
        console.print(
            f"{check.verdict.name} {check.code} {where}{check.problem}", style=_STYLES[check.verdict], markup=False
        )
        console.print(f"     {check.advice}", markup=False, soft_wrap=True)
