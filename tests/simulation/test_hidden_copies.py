"""Copies that cannot be read for a while: an eviction reaches them, too."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Sequence
from functools import partial

import pytest

from quire.client import AsyncClient
from quire.model.durability import Durability
from quire.model.errors import QuireError
from quire.model.iocb import Op
from quire.testing.simulation import simulate
from quire_storage.core.residency import Residency
from quire_storage.core.residency.departures import Departures
from quire_storage.core.residency.entry import Entry
from tests.integration.engine.disk import SimDisk, no_fault
from tests.simulation.cluster import Cluster
from tests.simulation.one_client import stored_prefix, with_client
from tests.simulation.prefixes import Prefix

_WAITED_S, _PAUSE_S = 900.0, 0.5
_SHOWN_S = 30.0  # the pause before another try doubles from half a second on


def _fail(disk: SimDisk, operations: Sequence[Op]) -> None:
    disk.fault = lambda op, at, offset, length: -errno.EIO if op in operations else None


async def _matches(client: AsyncClient, prefix: Prefix, chunks: int) -> None:
    async with asyncio.timeout(_WAITED_S):
        while (await client.lookup(prefix.namespace, prefix.keys, lease_ttl_ms=0)).matched_chunks != chunks:
            await asyncio.sleep(_PAUSE_S)


async def _found_again(
    cluster: Cluster, client: AsyncClient, *, restarts: bool, evicts: bool, retires: bool = False
) -> int:
    """Let the drives of every node fail, evict, and let them work: how many chunks look-ups find then.

    `retires`: the drives fail writes and are given up, else they fail reads.
    """
    cluster.objects_on = False
    prefix = await stored_prefix(cluster, client, Durability.LOCAL)
    count = len(prefix.keys)
    nodes = list(cluster.storage)
    for name in nodes:  # afterwards, copies are on drives alone
        await cluster.stop(name)
        await cluster.restart(name)
    await _matches(client, prefix, count)
    disks = [disk for name in nodes if (disk := cluster.members[name].disk) is not None]
    for disk in disks:
        _fail(disk, [Op.WRITE] if retires else [Op.READ])
    while retires and any(len(node._pool.map.failed_drives()) < 2 for node in cluster.storage.values()):  # type: ignore[union-attr]
        with contextlib.suppress(QuireError):
            await stored_prefix(cluster, client, Durability.LOCAL, number=6)
        await asyncio.sleep(_PAUSE_S)
    await _matches(client, prefix, 0)  # the scrubber comes by
    if evicts:
        await client.evict(prefix.namespace, prefix.keys)
    for disk in disks:
        disk.fault = no_fault
    if restarts:
        for name in nodes:
            await cluster.stop(name)
            await cluster.restart(name)
    await asyncio.sleep(_SHOWN_S)
    return (await client.lookup(prefix.namespace, prefix.keys, lease_ttl_ms=0)).matched_chunks


def _found(*, restarts: bool = False, evicts: bool = True, retires: bool = False) -> int:
    scenario = partial(_found_again, restarts=restarts, evicts=evicts, retires=retires)
    matched_chunks: int = simulate(1, partial(with_client, scenario=scenario))
    return matched_chunks


@pytest.mark.parametrize("restarts", [False, True], ids=["read again", "restarted"])
def test_what_was_evicted_while_it_could_not_be_read_stays_away(restarts: bool) -> None:
    assert _found(restarts=restarts) == 0


def test_what_was_evicted_from_retired_drives_stays_away_when_they_work_again() -> None:
    """A node without a readable copy confirmed the drop, and its drives brought the copies back."""
    assert _found(restarts=True, retires=True) == 0


def test_orders_that_are_confirmed_without_a_copy_let_it_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault put back: the check above can fail."""
    monkeypatch.setattr(Residency, "may_return", lambda self, key, generation: False)
    assert _found(restarts=True, retires=True) > 0


def test_what_was_not_evicted_comes_back() -> None:
    """The last copy: its entry ended when it was hidden."""
    assert _found(evicts=False) > 0


@pytest.mark.parametrize("restarts", [False, True], ids=["read again", "restarted"])
def test_copies_that_are_withdrawn_as_if_they_were_gone_come_back(
    restarts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault put back: the check above can fail."""
    withdraw = Departures.withdraw

    def as_gone(self: Departures, entries: Sequence[Entry], *, hidden: bool = False) -> None:
        withdraw(self, entries)

    monkeypatch.setattr(Departures, "withdraw", as_gone)
    assert _found(restarts=restarts) > 0
