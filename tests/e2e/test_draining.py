"""Storage nodes that are removed from a cluster under load: no acknowledged chunk is lost, and none too few is kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from quire.client import AdminClient, AsyncClient
from quire.model.durability import Durability
from quire.model.errors import ConditionFailed, InvalidRequest, PeerLost
from quire.model.hashing import Namespace
from quire.model.nodes import StorageState
from quire_tools.local import LocalCluster
from tests.e2e.helpers import SMALL_STORAGE, fetch_all, fresh_namespace, holders_of, random_payload, some_keys, store
from tests.e2e.test_cli import quire
from tests.polling import eventually

MIB = 1 << 20
_CHUNKS = 24
_ON_NODES = (Durability.MEMORY, Durability.LOCAL, Durability.REPLICATED)
Stored = dict[Namespace, tuple[Durability, npt.NDArray[np.uint8]]]


def _cluster(folder: Path, nodes: int, **settings: str) -> LocalCluster:
    return LocalCluster(
        folder, storage_nodes=nodes, arena_bytes=64 * MIB, drive_bytes=160 * MIB, settings=SMALL_STORAGE | settings
    )


@pytest.fixture
def two(tmp_path: Path) -> Iterator[LocalCluster]:
    with _cluster(tmp_path / "c", 2, QUIRE_STORAGE_OBJECT_URL="") as cluster:
        yield cluster


async def _store(client: AsyncClient, durability: Durability, seed: int) -> tuple[Namespace, npt.NDArray[np.uint8]]:
    namespace, payload = fresh_namespace(), random_payload(fresh_namespace(), _CHUNKS, seed)
    await store(client, namespace, some_keys(namespace, _CHUNKS), payload, durability=durability)
    return namespace, payload


async def _check(client: AsyncClient, namespace: Namespace, payload: npt.NDArray[np.uint8]) -> None:
    """A look-up may name a node that has just been killed, for an object that any node can read."""
    async with asyncio.timeout(30):
        summary = None
        while summary is None:
            found = await client.lookup(namespace, some_keys(namespace, _CHUNKS))
            assert found.matched_chunks == _CHUNKS
            with contextlib.suppress(PeerLost):
                got, summary = await fetch_all(client, found)
            await client.release(found)
    assert summary.usable_chunks == _CHUNKS and np.array_equal(got, payload)


async def _holders(cluster: LocalCluster, namespace: Namespace) -> list[set[str]]:
    return await holders_of(cluster, some_keys(namespace, _CHUNKS))


async def _load(client: AsyncClient, levels: Sequence[Durability], stored: Stored, stop: asyncio.Event) -> int:
    """Store at each level in turn, and read a prefix back after each; return how many stores there were."""
    count = 0
    while not stop.is_set():
        durability = levels[count % len(levels)]
        namespace, payload = await _store(client, durability, count)
        stored[namespace] = durability, payload
        count += 1
        earlier = list(stored)[count * 7 % len(stored)]
        await _check(client, earlier, stored[earlier][1])
        await asyncio.sleep(0.05)
    return count


@pytest.mark.parametrize(
    ("levels", "settings"),
    [
        pytest.param(_ON_NODES, {"QUIRE_STORAGE_OBJECT_URL": ""}, id="nodes alone"),
        pytest.param((*_ON_NODES, Durability.OBJECT), {}, id="with an object tier", marks=pytest.mark.slow),
    ],
)
async def test_from_four_nodes_to_two_under_load(
    tmp_path: Path, levels: Sequence[Durability], settings: dict[str, str]
) -> None:
    """At each level of durability: chunks acknowledged before, while and after they leave are there, and right."""
    with _cluster(tmp_path / "c", 4, **settings) as cluster:
        async with AsyncClient(cluster.gateway_address) as client:
            stored: Stored = {}
            for seed, durability in enumerate([*levels] * 3):
                namespace, payload = await _store(client, durability, seed)
                stored[namespace] = durability, payload
            first = dict(stored)
            stop = asyncio.Event()
            loading = asyncio.create_task(_load(client, levels, stored, stop))
            names = ["storage-0", "storage-3"]
            folder = ("--folder", str(cluster.folder))
            done = await asyncio.gather(
                *(asyncio.to_thread(quire, "decommission", name, *folder, "--stalled-s", "60") for name in names)
            )
            for name, ended in zip(names, done, strict=True):
                assert ended.returncode == 0, ended.stdout + ended.stderr
                answer = await asyncio.to_thread(quire, "safe-to-remove", name, *folder)
                assert answer.returncode == 0, answer.stdout
            before = [name for name, (level, _) in first.items() if level is Durability.REPLICATED]
            holders = [each - {*names} for name in before for each in await _holders(cluster, name)]
            assert all("@object" in each or len(each) == 2 for each in holders), ("before one is stopped", holders)
            for name in names:
                cluster.kill(name)  # nothing of it is needed any more, not even its last words
            await asyncio.sleep(0.5)
            stop.set()
            assert await loading > 0
            for namespace, (_, payload) in stored.items():
                await _check(client, namespace, payload)

            async def twice() -> bool:
                """Stores that were replicated while the nodes left may have their second copy a moment later."""
                replicated = [name for name, (level, _) in stored.items() if level is Durability.REPLICATED]
                holders = [names for name in replicated for names in await _holders(cluster, name)]
                return all("@object" in names or len(names) == 2 for names in holders)

            await eventually(twice)
            state = json.loads((await asyncio.to_thread(quire, "status", *folder, "--json")).stdout)
            assert {each["node"] for each in state if each["role"] == "storage"} >= {"storage-1", "storage-2"}


async def test_a_node_with_the_only_copy_stays(two: LocalCluster) -> None:
    """A node is drained before it is decommissioned, and not without another node; afterwards it can be used again."""
    async with (
        AsyncClient(two.gateway_address) as client,
        AdminClient(two.admin_address, two.secret) as operator,
    ):
        namespace, payload = await _store(client, Durability.LOCAL, 1)
        (name,) = {run.node_id for run in (await client.lookup(namespace, some_keys(namespace, _CHUNKS))).ranges}
        other = "storage-1" if name == "storage-0" else "storage-0"
        removal = await operator.check_removal(name)
        assert (removal.state, removal.sole_chunks) == (StorageState.ACTIVE, _CHUNKS) and not removal.is_safe
        with pytest.raises(ConditionFailed, match=f"{_CHUNKS} of its chunks"):
            await operator.decommission(name)
        with pytest.raises(InvalidRequest, match="storage-0, storage-1"):
            await operator.set_draining("storage-9")
        await operator.set_draining(other)
        with pytest.raises(ConditionFailed, match="no other storage node"):
            await operator.set_draining(name)
        late, _ = await _store(client, Durability.LOCAL, 2)
        assert {each for names in await _holders(two, late) for each in names} == {name}, "the node that stays"
        await operator.set_draining(other, draining=False)
        await operator.set_draining(name)
        await eventually(lambda: _is_drained(operator, name))
        await _check(client, namespace, payload)
        await operator.decommission(name)
        await eventually(lambda: _is_safe(operator, name))
        await operator.set_draining(name, draining=False)
        assert (await operator.check_removal(name)).state is StorageState.ACTIVE


async def _is_drained(operator: AdminClient, name: str) -> bool:
    return (await operator.check_removal(name)).is_drained


async def _is_safe(operator: AdminClient, name: str) -> bool:
    return (await operator.check_removal(name)).is_safe


async def test_a_node_that_is_gone_is_expected_until_it_is_decommissioned(two: LocalCluster) -> None:
    """A lost node stays listed as away, with a warning; only an operator gives up the chunks that it alone has."""
    folder = ("--folder", str(two.folder))
    async with (
        AsyncClient(two.gateway_address) as client,
        AdminClient(two.admin_address, two.secret) as operator,
    ):
        namespace, _ = await _store(client, Durability.LOCAL, 1)
        (name,) = {run.node_id for run in (await client.lookup(namespace, some_keys(namespace, _CHUNKS))).ranges}
        two.kill(name)

        async def away() -> bool:
            return any(node.is_away and node.node_id == name for node in await client.status(with_away=True))

        await eventually(away)
        health = await asyncio.to_thread(quire, "health", *folder, "--json")
        assert [(each["code"], each["node"]) for each in json.loads(health.stdout)["checks"]] == [("NODE_AWAY", name)]
        refused = await asyncio.to_thread(quire, "decommission", name, *folder)
        assert refused.returncode == 1 and f"{_CHUNKS} of its chunks" in refused.stderr.replace("\n", " ")
        given_up = await asyncio.to_thread(quire, "decommission", name, *folder, "--lose-chunks")
        assert given_up.returncode == 0, given_up.stderr
        assert not await away()
        assert (await operator.check_removal(name)).state is StorageState.DECOMMISSIONED


async def test_a_decommissioned_node_that_crashes_is_not_used_when_it_is_back(two: LocalCluster) -> None:
    async with (
        AsyncClient(two.gateway_address) as client,
        AdminClient(two.admin_address, two.secret) as operator,
    ):
        await operator.set_draining("storage-1")
        await eventually(lambda: _is_drained(operator, "storage-1"))
        await operator.decommission("storage-1")
        two.kill("storage-1")
        await asyncio.to_thread(two.restart, "storage-1")
        for seed in range(4):
            namespace, _ = await _store(client, Durability.LOCAL, seed)
            assert {name for names in await _holders(two, namespace) for name in names} == {"storage-0"}
        await eventually(lambda: _is_safe(operator, "storage-1"))
