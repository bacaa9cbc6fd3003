"""Calls about chunks of many index buckets, on a real Redis and on a real Redis Cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import redis.asyncio as redis

from quire.model.errors import QuireError
from quire.model.fingerprints import fingerprint
from quire.model.index import OBJECT_TIER
from quire.model.keys import BUCKET_CHUNKS
from quire.model.records import records
from quire.testing.contracts.index import chain, listing_of, sum_of
from quire_server.redis import PrefixIndex
from quire_server.redis.prefix_index import index as index_module
from quire_server.redis.prefix_index.slots import bucket_key


@pytest.mark.parametrize("operation", ["register", "evict", "unregister", "join", "add_objects", "expect_objects"])
async def test_a_call_about_many_buckets_asks_redis_a_few_times(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    index, chunks = PrefixIndex(redis_client), records(chain(800), 0, 800, unchained=True)
    generations = await index.register(OBJECT_TIER, chunks, 0)
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "register": lambda: index.register("a", chunks, 0),
        "evict": lambda: index.evict(chunks, 0, 0),
        "unregister": lambda: index.unregister("a", chunks, 0),
        "join": lambda: index.join("a", chunks, generations, only_in_object=True),
        "add_objects": lambda: index.add_objects(chunks, generations),
        "expect_objects": lambda: index.expect_objects(chunks, 0),
    }
    scripts, run = list[str](), cast(Any, index._run)

    async def counted(name: str, *arguments: Any) -> Any:
        scripts.append(name)
        return await run(name, *arguments)

    monkeypatch.setattr(index, "_run", counted)
    await calls[operation]()
    assert len(scripts) == 4, "of 256 buckets at most, so that no other request waits for long"
    keys = [chunk.key for chunk in chunks if operation in ("register", "join")]
    assert await listing_of(index, "a") == await sum_of(index, "a", keys)


async def test_a_call_that_was_executed_is_not_repeated(redis_cluster_client: redis.Redis) -> None:
    """A master has lost its scripts. Its calls are repeated; the other masters have evicted their chunks already."""
    index, chunks = PrefixIndex(redis_cluster_client), records(chain(200), 0, 200, unchained=True)
    await index.register("a", chunks, 0)
    await index.evict(chunks[100:], 0, 0)  # every master has the script
    cluster: Any = redis_cluster_client
    await cluster.execute_command("SCRIPT FLUSH", target_nodes=cluster.get_primaries()[0])
    assert len((await index.evict(chunks[:100], 0, 0)).removed) == 100


@pytest.mark.parametrize("fault", [False, True])
async def test_what_extends_a_chunk_from_another_bucket_goes_before_it(
    any_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch, fault: bool
) -> None:
    """A chunk and its parent are evicted by one call. Changing both buckets at once would keep the parent."""
    if fault:
        monkeypatch.setattr(index_module, "independent", lambda groups: [groups])
    index, keys = PrefixIndex(any_redis), chain(2 * BUCKET_CHUNKS)
    chunks = records(keys, 0, len(keys))
    await index.register("a", chunks, 0)
    removed = (await index.evict(chunks[::-1], 0, 0)).removed
    assert (len(removed) == len(keys)) is not fault


async def test_new_buckets_of_one_tag_are_counted_together(redis_client: redis.Redis) -> None:
    """A node's count of all buckets of a tag is one field, which a call writes once."""
    index, chunks = PrefixIndex(redis_client), records(chain(400), 0, 400, unchained=True)
    await index.register("a", chunks, 0)
    assert await listing_of(index, "a") == await sum_of(index, "a", [chunk.key for chunk in chunks])


async def test_what_a_failed_registration_has_written_is_counted(redis_client: redis.Redis) -> None:
    """One of its buckets has a damaged page. Chunks that were indexed uncounted would never be counted again."""
    index, chunks = PrefixIndex(redis_client), records(chain(40), 0, 40, unchained=True)
    damaged = bucket_key(fingerprint(chunks[20].bucket))
    await redis_client.set(damaged, b"no page")
    with pytest.raises(QuireError):
        await index.register("a", chunks, 0)
    await redis_client.delete(damaged)
    await index.register("a", chunks, 0)
    assert await listing_of(index, "a") == await sum_of(index, "a", [chunk.key for chunk in chunks])
