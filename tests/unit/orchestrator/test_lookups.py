"""Look-ups and leases, allocations: decisions of the real parts, in milliseconds."""

from __future__ import annotations

import pytest

from quire.model.durability import Durability, OnExisting
from quire.model.errors import InvalidRequest, KeysInvalid
from quire.model.keys import ChunkKeys
from quire.model.lease import LeaseSigner
from quire.model.nodes import StorageInfo
from quire.model.policy import TenantPolicy
from quire.model.ranges import ChunkRange
from quire.model.records import records
from quire_server.lookups import Question
from tests.unit.orchestrator.world import CHUNK, LINK, SECRET, SPACE, World

SIGNER = LeaseSigner(SECRET.encode())


async def test_a_lease_is_over_what_matched_with_advice_and_without() -> None:
    """One meaning of matched: advice says how many to take, and leaves the lease alone."""
    world = World()
    keys = await world.stored(40)
    await world.index.register("b", records(keys, 30, 10), 0)
    await world.index.unregister("a", records(keys, 30, 10), 0)
    lookups = (await world.start()).lookups
    plain = await lookups.lookup(Question(SPACE, keys, 1000))
    assert plain.matched_chunks == 40 and plain.advice is None
    assert list(plain.ranges) == [ChunkRange("a", 0, 30), ChunkRange("b", 30, 10)]
    lease = SIGNER.open(plain.token)
    lease.check_keys(keys)
    assert lease.ranges == tuple(plain.ranges) and lease.addresses == {"a": "a:1", "b": "b:1"}
    assert lease.tenant == TenantPolicy(SPACE.tenant)
    advised = await lookups.lookup(Question(SPACE, keys, 1000, prompt_tokens=700, device="a100-80gb"))
    assert advised.advice is not None and advised.advice.rate_bytes_per_s == LINK
    assert SIGNER.open(advised.token).ranges == lease.ranges
    assert lookups.leases == 2
    assert await lookups.release(plain.token) and not await lookups.release(plain.token)
    assert lookups.leases == 1
    await world.clock.advance(2.0)
    assert lookups.leases == 0, "they run out"


async def test_leases_that_ran_out_are_forgotten_without_being_counted() -> None:
    """Only a scrape of metrics forgot them, and by default there is none."""
    world = World()
    keys = await world.stored(4)
    lookups = (await world.start()).lookups
    for _ in range(50):
        await lookups.lookup(Question(SPACE, keys, 1000))
        await world.clock.advance(0.5)
    assert len(lookups._leased) <= 3 and len(lookups._expiries) <= 3


async def test_a_look_up_without_a_lease_has_no_side_effect() -> None:
    world = World()
    keys = await world.stored(3)
    found = await (await world.start()).lookups.lookup(Question(SPACE, keys))
    assert (found.matched_chunks, found.token) == (3, b"")
    assert await world.index.pins(b"") == 0
    assert not (await (await world.start()).lookups.lookup(Question(SPACE, ChunkKeys(b"x" * 32), 1000))).token


async def test_what_can_be_read_is_pinned_and_not_what_only_a_dead_node_holds() -> None:
    """A pin on a chunk that cannot be read goes with its entry, and would take the promise for the rest along."""
    world = World()
    keys = await world.stored(300)
    await world.index.register("gone", records(keys, 270, 30), 0)
    await world.index.unregister("a", records(keys, 270, 30), 0)
    found = await (await world.start()).lookups.lookup(Question(SPACE, keys, 1000))
    assert found.matched_chunks == 270
    lease = SIGNER.open(found.token)
    assert (lease.tip, lease.tip_bucket) == (keys.at(269), keys.bucket_of(269))
    await world.index.unregister("gone", records(keys, 270, 30), 0)
    assert not (await world.index.evict(list(reversed(records(keys, 0, 270))), 0, 0)).removed
    nowhere = await (await world.start()).lookups.lookup(Question(SPACE, ChunkKeys(b"x" * 32), 1000))
    assert not nowhere.token and await world.index.pins(b"") == 1, "no lease, no pin"


async def test_what_cannot_be_looked_up_is_refused() -> None:
    world = World()
    keys = await world.stored(2)
    lookups = (await world.start()).lookups
    with pytest.raises(InvalidRequest, match="lease_ttl_ms"):
        await lookups.lookup(Question(SPACE, keys, 10**9))
    with pytest.raises(KeysInvalid, match="twice"):
        await lookups.lookup(Question(SPACE, ChunkKeys(keys.at(0) * 2), 10))
    with pytest.raises(InvalidRequest, match="prompt_tokens"):
        await lookups.lookup(Question(SPACE, keys, 10, prompt_tokens=1, device="a100-80gb"))


async def test_a_tenants_cap_bounds_what_is_advised() -> None:
    world = World(tenants_={SPACE.tenant: TenantPolicy(SPACE.tenant, 2.0, 1000)})
    keys = await world.stored(40)
    found = await (await world.start()).lookups.lookup(Question(SPACE, keys, 10, prompt_tokens=700, device="a100-80gb"))
    assert found.advice is not None and found.advice.chunks == 0, "at a kilobyte a second anything is faster"
    assert SIGNER.open(found.token).tenant == TenantPolicy(SPACE.tenant, 2.0, 1000)


async def test_an_allocation_raises_what_is_stored_and_places_the_rest() -> None:
    world = World(can_raise=True)
    keys = await world.stored(6)
    allocation = (await world.start()).allocation
    ranges, nodes, known = await allocation.allocate(keys, 0, Durability.LOCAL, OnExisting.SKIP, chunk_bytes=CHUNK)
    assert (list(ranges), list(nodes), known) == ([], [], 6) and world.raised == ["a"]
    ranges, nodes, known = await allocation.allocate(keys, 2, Durability.LOCAL, OnExisting.VERIFY, chunk_bytes=CHUNK)
    assert list(ranges) == [ChunkRange("a", 2, 4)] and [node.grpc_address for node in nodes] == ["a:1"]
    world.can_raise = False
    ranges, _, known = await allocation.allocate(keys, 0, Durability.LOCAL, OnExisting.SKIP, chunk_bytes=CHUNK)
    assert known == 0 and sum(each.count for each in ranges) == 6, "what cannot be raised is stored again"
    with pytest.raises(InvalidRequest, match="no parent"):
        await allocation.allocate(keys, 3, Durability.LOCAL, OnExisting.SKIP, chunk_bytes=CHUNK)
    with pytest.raises(InvalidRequest, match="first_chunk"):
        await allocation.allocate(keys, 7, Durability.MEMORY, OnExisting.SKIP, chunk_bytes=CHUNK)


async def test_a_node_that_leaves_is_read_from_no_more() -> None:
    world = World()
    keys = await world.stored(3)
    orchestrator = await world.start()
    world.infos = {"b": StorageInfo()}
    await orchestrator.cluster.refresh()
    assert (await orchestrator.lookups.lookup(Question(SPACE, keys, 10))).matched_chunks == 0
    await orchestrator.close()
