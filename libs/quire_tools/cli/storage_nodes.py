"""`quire drain`, `quire decommission`, `quire safe-to-remove`: storage nodes that are to be removed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from quire.client import AdminClient
from quire.model.errors import ConditionFailed, DeadlineExceeded, Unavailable
from quire.model.nodes import Removal
from quire_tools.cli.cluster import as_operator

_LOOK_S: Final = 0.5
_SHARE: Final = 4
"""A cluster that counts for long is asked less often."""
console = Console()


def drain(folder: Path, admin: str, node: str, *, wait: bool, stalled_s: float) -> None:
    """Set a node draining, and wait until others have its chunks."""

    async def work(operator: AdminClient) -> None:
        await _check_alive(operator, node)
        await operator.set_draining(node)
        if not wait:
            console.print(f"{node}: its chunks are being copied; `quire status` shows how many are left")
            return
        await _until(operator, node, lambda removal: removal.is_drained, stalled_s)
        console.print(f"{node}: other nodes that stay, or the object tier, have all of its chunks")

    as_operator(folder, admin, work)


def undo(folder: Path, admin: str, node: str) -> None:
    """Have a node used again."""

    async def work(operator: AdminClient) -> None:
        await operator.set_draining(node, draining=False)
        console.print(f"{node}: takes stores again")

    as_operator(folder, admin, work)


def decommission(folder: Path, admin: str, node: str, *, lose_chunks: bool, stalled_s: float) -> None:
    """Drain a node, take it out of use, and wait until it has confirmed that."""

    async def work(operator: AdminClient) -> None:
        if lose_chunks:
            await operator.decommission(node, lose_chunks=True)
            console.print(f"{node}: is not used any more; stop it")
            return
        await _check_alive(operator, node)
        await operator.set_draining(node)
        await _until(operator, node, lambda removal: removal.is_drained, stalled_s)
        await operator.decommission(node)
        await _until(operator, node, lambda removal: removal.is_safe, stalled_s)
        console.print(f"{node}: can be stopped for good now")

    as_operator(folder, admin, work)


def is_safe_to_remove(folder: Path, admin: str, node: str, *, as_json: bool) -> bool:
    """Print whether a node can be stopped for good, or why not; return whether it can."""
    answers: list[Removal] = []

    async def work(operator: AdminClient) -> None:
        answers.append(await operator.check_removal(node))

    as_operator(folder, admin, work)
    (removal,) = answers
    if as_json:
        print(json.dumps({**dataclasses.asdict(removal), "state": removal.state.value}, indent=2))
    else:
        console.print(f"{node}: {removal.reason or 'can be stopped for good'}", markup=False)
    return removal.is_safe


async def _check_alive(operator: AdminClient, node: str) -> None:
    """Check that a node can copy its chunks. Raises `ConditionFailed` if it is away."""
    removal = await operator.check_removal(node)
    if not removal.is_alive:
        raise ConditionFailed(f"{node}: {removal.reason} (--lose-chunks gives it up)")


async def _until(operator: AdminClient, node: str, is_done: Callable[[Removal], bool], stalled_s: float) -> None:
    """Wait, with progress. Raises `DeadlineExceeded` when the chunks that are left became no fewer for `stalled_s`."""
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[reason]}"), TimeElapsedColumn()
    loop = asyncio.get_running_loop()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(node, total=None, reason="")
        previous, total, progressed_s, reason = 0, 0, loop.time(), "it does not answer"
        while True:
            asked_s = loop.time()
            try:
                removal = await operator.check_removal(node)
            except (Unavailable, DeadlineExceeded) as error:  # an orchestrator restarts: the nodes go on
                reason = str(error)
            else:
                if is_done(removal):
                    return
                count, reason, total = removal.left_chunks, removal.reason, max(total, removal.left_chunks)
                if count != previous:  # a pass that begins again has more: the node works
                    previous, progressed_s = count, loop.time()
                progress.update(bar, total=total or None, completed=total - count, reason=reason)
            if loop.time() - progressed_s > stalled_s:
                raise DeadlineExceeded(f"{node}: nothing was copied for {stalled_s:g} s: {reason}")
            await asyncio.sleep(max(_LOOK_S, _SHARE * (loop.time() - asked_s)))
