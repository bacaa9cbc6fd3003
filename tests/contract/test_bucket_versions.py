"""Versions of objects, on a real Redis and in memory: replaced and deleted ones stay readable."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis

from quire.model.buckets import GRACE_MS, NULL_VERSION, Blob, DeleteOutcome, StoredObject, Versioning
from quire.model.policy import ENTRY_BYTES
from quire.testing.buckets import MemoryBuckets, _Bucket
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.s3.listing import list_versions
from quire_server.redis import S3Buckets
from tests.contract.bucket_scene import PLAIN, Scene, body

ENABLED, SUSPENDED = Versioning.ENABLED.value.encode(), Versioning.SUSPENDED.value.encode()


@pytest.fixture
def scene(bucket_scene: Scene) -> Scene:
    return bucket_scene


async def _put(scene: Scene, key: str, data: bytes) -> str:
    return (await scene.backend.put(key, body(data), PLAIN, "")).version_id


async def _bytes_of(scene: Scene, key: str, version_id: str = "") -> bytes:
    entry = await scene.backend.found(key, version_id)
    return b"".join([bytes(piece) async for piece in scene.backend.read(entry, 0, entry.size)])


async def _all(scene: Scene) -> list[tuple[str, str, bool, bool]]:
    """Key, version, whether it is the newest, and whether it is a delete marker."""
    page = await scene.backend.versions("", "", "", False, 1000)
    return [
        (version.key, version.version_id or NULL_VERSION, latest, version.is_marker)
        for version, latest in zip(page.versions, page.latest, strict=True)
    ]


async def test_a_replaced_object_stays_as_a_version(scene: Scene) -> None:
    await _put(scene, "k", b"before versioning")
    assert await scene.buckets.set("t", "b", "versioning", ENABLED)
    first, second = await _put(scene, "k", b"first"), await _put(scene, "k", b"second")
    assert first != second and NULL_VERSION not in (first, second)
    assert await _bytes_of(scene, "k") == await _bytes_of(scene, "k", second) == b"second"
    assert await _bytes_of(scene, "k", first) == b"first"
    assert await _bytes_of(scene, "k", NULL_VERSION) == b"before versioning"
    assert await _all(scene) == [
        ("k", second, True, False),
        ("k", first, False, False),
        ("k", NULL_VERSION, False, False),
    ]
    await scene.later()
    assert scene.files() == 3, "none of their bytes are garbage"
    with pytest.raises(S3Error, match="The specified version does not exist"):
        await scene.backend.found("k", "f" * 31)


async def test_a_deletion_leaves_a_marker_that_can_be_taken_away(scene: Scene) -> None:
    await scene.buckets.set("t", "b", "versioning", ENABLED)
    version = await _put(scene, "k", b"bytes")
    deletion = await scene.backend.delete("k", "")
    assert (deletion.outcome, deletion.is_marker) == (DeleteOutcome.DELETED, True)
    assert await scene.backend.head("k") is None and (await scene.backend.page("", "", False, 10)).objects == []
    with pytest.raises(S3Error) as deleted:
        await scene.backend.found("k")
    assert (deleted.value.code, deleted.value.headers["x-amz-delete-marker"]) == ("NoSuchKey", "true")
    with pytest.raises(S3Error) as marker:
        await scene.backend.found("k", deletion.version_id)
    assert marker.value.code == "MethodNotAllowed"
    assert await _bytes_of(scene, "k", version) == b"bytes"
    assert not await scene.buckets.drop("t", "b", 0), "a bucket with versions is not empty"
    undone = await scene.backend.delete_version("k", deletion.version_id)
    assert undone.is_marker and await _bytes_of(scene, "k") == b"bytes"
    await scene.backend.delete_version("k", version)
    assert await _all(scene) == []
    await scene.later()
    assert scene.files() == 0
    assert await scene.buckets.drop("t", "b", 0)
    await scene.buckets.create("t", "b", 0.0)
    assert await scene.buckets.settings("t", "b") == {}, "a new bucket has no settings of an old one"


async def test_the_newest_version_that_is_left_becomes_the_object(scene: Scene) -> None:
    await scene.buckets.set("t", "b", "versioning", ENABLED)
    versions = [await _put(scene, "k", str(number).encode()) for number in range(4)]
    for newest in (3, 2, 1):
        assert await _bytes_of(scene, "k") == str(newest).encode()
        await scene.backend.delete_version("k", versions[newest])
    assert await _bytes_of(scene, "k") == b"0"
    await scene.backend.delete("k", "")
    later = await _put(scene, "k", b"later")
    await scene.backend.delete_version("k", later)
    assert await scene.backend.head("k") is None, "a delete marker is the newest"


async def test_suspended_versioning_replaces_the_version_null_only(scene: Scene) -> None:
    await scene.buckets.set("t", "b", "versioning", ENABLED)
    version_id = await _put(scene, "k", b"kept")
    await scene.buckets.set("t", "b", "versioning", SUSPENDED)
    assert await _put(scene, "k", b"one") == await _put(scene, "k", b"two") == ""
    assert await _all(scene) == [("k", NULL_VERSION, True, False), ("k", version_id, False, False)]
    deletion = await scene.backend.delete("k", "")
    assert deletion.version_id == NULL_VERSION
    assert await _all(scene) == [("k", NULL_VERSION, True, True), ("k", version_id, False, False)]
    await _put(scene, "k", b"three")
    assert await _all(scene) == [("k", NULL_VERSION, True, False), ("k", version_id, False, False)]
    await scene.later()
    assert scene.files() == 2


async def test_versions_and_markers_are_charged(scene: Scene) -> None:
    await scene.buckets.set("t", "b", "versioning", ENABLED)
    first = await _put(scene, "k", b"x" * 100)
    await _put(scene, "k", b"x" * 10)
    await scene.backend.delete("k", "")
    assert await scene.buckets.stored_bytes("t") == ENTRY_BYTES * 4 + 110
    await scene.backend.delete_version("k", first)
    await scene.later()
    assert await scene.buckets.stored_bytes("t") == ENTRY_BYTES * 3 + 10


async def test_versions_are_listed_in_pages(scene: Scene) -> None:
    await scene.buckets.set("t", "b", "versioning", ENABLED)
    for key in ("a", "a/1", "a/2", "b", "a/1", "a", "a", "b"):
        await _put(scene, key, key.encode())
    await scene.backend.delete("a/2", "")
    every = await _all(scene)
    assert len(every) == 9 and [key for key, *_ in every] == ["a"] * 3 + ["a/1"] * 2 + ["a/2"] * 2 + ["b"] * 2
    for limit in (1, 2, 3, 4, 9, 10):
        listed, marker, truncated = list[tuple[str, str, bool, bool]](), ("", ""), True
        while truncated:
            listing = await list_versions(scene.backend, "", "", marker, limit)
            listed += [
                (version.key, version.version_id or NULL_VERSION, latest, version.is_marker)
                for version, latest in listing.versions
            ]
            marker, truncated = (listing.last, listing.last_version), listing.truncated
        assert listed == every, f"by {limit}"
    grouped = await list_versions(scene.backend, "", "/", ("", ""), 100)
    assert [version.key for version, _ in grouped.versions] == ["a", "a", "a", "b", "b"]
    assert grouped.prefixes == ["a/"]
    rest = await list_versions(scene.backend, "", "/", ("a/", ""), 100)
    assert [version.key for version, _ in rest.versions] == ["b", "b"] and not rest.prefixes


async def test_a_marker_outside_the_prefix_shows_nothing_outside_it(scene: Scene) -> None:
    """A grant for a prefix does not reach further by a version that lies before it."""
    first = await _put(scene, "a", b"not theirs")
    assert first == "", "written before versioning"
    await scene.buckets.set("t", "b", "versioning", ENABLED)
    for key in ("a", "a", "azz-secret", "azz-secret", "b/1", "b/1"):
        await _put(scene, key, b"x")
    foreign = (await scene.backend.versions("a", "", "", False, 9)).versions
    assert len(foreign) == 5
    for version_id in (version.version_id or NULL_VERSION for version in foreign):
        page = await scene.backend.versions("b/", "a", version_id, False, 1000)
        assert [version.key for version in page.versions] == ["b/1", "b/1"], version_id


async def test_a_version_that_has_become_the_object_is_not_deleted_as_an_older_one(scene: Scene) -> None:
    """A lifecycle has read it as hidden by a delete marker, which its owner takes away."""
    await scene.buckets.set("t", "b", "versioning", ENABLED)
    version_id = await _put(scene, "k", b"restored")
    marker = await scene.backend.delete("k", "")
    (_, older) = (await scene.backend.versions("", "", "", False, 10)).versions
    assert older.version_id == version_id
    await scene.backend.delete_version("k", marker.version_id)
    with pytest.raises(S3Error, match="another"):
        await scene.backend.delete_unchanged(older, for_good=True, older=True)
    assert await _bytes_of(scene, "k") == b"restored"


async def test_a_charge_is_counted_before_the_first_deletion(redis_client: redis.Redis, tmp_path: Path) -> None:
    """Buckets of releases before 0.3 have no charge. A deletion counts all of it, then subtracts the entry."""
    for state in (b"", ENABLED):
        scene = Scene(redis_client, tmp_path / (state.decode() or "never"))
        await scene.buckets.create("t", "b", 0.0)
        if state:
            await scene.buckets.set("t", "b", "versioning", state)
        for key in ("k", "l"):
            version_id = await _put(scene, key, b"x" * 10)
        await redis_client.delete("quire:s3:{t/b}:charged")
        await scene.backend.delete("k", "")
        assert await scene.buckets.stored_bytes("t") == ENTRY_BYTES * (2 + 2 * bool(state)) + 20
        await redis_client.delete("quire:s3:{t/b}:charged")
        await (scene.backend.delete_version("l", version_id) if state else scene.backend.delete("l", ""))
        assert await scene.buckets.stored_bytes("t") == ENTRY_BYTES * (1 + 2 * bool(state)) + 20
        await redis_client.flushall()


async def test_an_object_that_was_written_again_is_not_deleted_as_the_one_that_was_read(scene: Scene) -> None:
    """Nor one with the same bytes: a client has stored it since."""
    await _put(scene, "k", b"same")
    entry = await scene.backend.found("k")
    await scene.clock.advance(1.0)
    await _put(scene, "k", b"same")
    with pytest.raises(S3Error, match="another"):
        await scene.backend.delete_unchanged(entry, for_good=False)
    await scene.buckets.set("t", "b", "versioning", ENABLED)
    entry = await scene.backend.found("k")
    await scene.backend.tag("k", "", {"colour": "red"})
    with pytest.raises(S3Error, match="another"):
        await scene.backend.delete_unchanged(entry, for_good=True)
    entry = await scene.backend.found("k")
    assert entry.tags == {"colour": "red"}
    await scene.backend.delete_unchanged(entry, for_good=True)
    assert await _all(scene) == []


async def test_a_version_that_becomes_the_object_while_it_is_read_is_found(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A promoted version moves between two of Redis' hashes: a read of one after the other missed it in both."""
    scene = Scene(redis_client, tmp_path / "objects")
    await scene.buckets.create("t", "b", 0.0)
    await scene.buckets.set("t", "b", "versioning", ENABLED)
    first, second = await _put(scene, "k", b"1"), await _put(scene, "k", b"2")
    hget: Any = redis_client.hget
    looks = 0

    async def hget_then_promotion(*arguments: Any) -> Any:
        nonlocal looks
        raw = await hget(*arguments)
        looks += 1
        if looks == 1:
            await scene.backend.delete_version("k", second)
        return raw

    monkeypatch.setattr(redis_client, "hget", hget_then_promotion)
    entry = await scene.backend.found("k", first)
    assert (entry.version_id, entry.size, looks) == (first, 1, 1)


async def test_tags_are_those_of_a_version(scene: Scene) -> None:
    await scene.buckets.set("t", "b", "versioning", ENABLED)
    first, second = await _put(scene, "k", b"1"), await _put(scene, "k", b"2")
    await scene.backend.tag("k", first, {"n": "1"})
    await scene.backend.tag("k", "", {"n": "2"})
    tags = [(await scene.backend.found("k", version)).tags for version in (first, second)]
    assert tags == [{"n": "1"}, {"n": "2"}]
    assert await _bytes_of(scene, "k", first) == b"1", "the rest is as it was"


async def _agree(redis_client: redis.Redis, seed: int) -> None:
    """Random writes, deletions and changes of versioning; after each of them Redis and memory have the same."""
    rng, stores = random.Random(seed), tuple[Any, ...]((S3Buckets(redis_client), MemoryBuckets()))
    pairs: dict[str, str] = {}
    for buckets in stores:
        await buckets.create("t", "b", 0.0)
    for step in range(120):
        key, kind = rng.choice("ab"), rng.random()
        page = await stores[0].versions("t", "b", "", "", "", False, 1000)
        if kind < 0.1:
            state = rng.choice([ENABLED, SUSPENDED])
            for buckets in stores:
                await buckets.set("t", "b", "versioning", state)
        elif kind < 0.5:
            blob = Blob(f"blob-{step}", step + 1)
            for buckets in stores:
                await buckets.will_write("t", "b", blob.name, step)
            entry = StoredObject(key, f"{step:032x}", size=step + 1, modified_s=float(step), blobs=(blob,))
            written = [(await buckets.put("t", "b", entry, "", step)).version_id for buckets in stores]
            pairs[written[0]] = written[1]
        elif kind < 0.7:
            deletions = [(await buckets.delete("t", "b", key, step)) for buckets in stores]
            assert (deletions[0].outcome, deletions[0].is_marker) == (deletions[1].outcome, deletions[1].is_marker)
            pairs[deletions[0].version_id] = deletions[1].version_id
        elif page.versions:
            version = rng.choice(page.versions)
            ids = version.version_id or NULL_VERSION, pairs.get(version.version_id, version.version_id) or NULL_VERSION
            if kind < 0.8:
                for buckets, version_id in zip(stores, ids, strict=True):
                    assert await buckets.tag("t", "b", version.key, version_id, {"step": str(step)})
            else:
                ended = [
                    await buckets.delete_version("t", "b", version.key, version_id, step)
                    for buckets, version_id in zip(stores, ids, strict=True)
                ]
                assert ended[0].outcome is ended[1].outcome is DeleteOutcome.DELETED
                assert ended[0].is_marker == ended[1].is_marker
        assert await _seen(stores[0], pairs) == await _seen(stores[1], {}), f"after step {step}"
    for buckets in stores:
        for name in await buckets.garbage("t", "b", GRACE_MS * 1000, 1000):
            await buckets.removed("t", "b", [name])
    assert await _seen(stores[0], pairs) == await _seen(stores[1], {})


async def _seen(buckets: Any, names: dict[str, str]) -> object:
    """Return all visible state of the buckets. `names`: ids of versions in the other buckets, by those in these."""
    page = await buckets.versions("t", "b", "", "", "", False, 1000)
    current = await buckets.page("t", "b", "", "", False, 1000)
    listed = [
        (version.key, names.get(version.version_id, version.version_id), version.etag, latest, dict(version.tags))
        for version, latest in zip(page.versions, page.latest, strict=True)
    ]
    objects = [(version.key, names.get(version.version_id, version.version_id)) for version in current.objects]
    return listed, objects, await buckets.stored_bytes("t")


@pytest.mark.parametrize("seed", range(12))
async def test_redis_and_memory_have_the_same_versions(redis_client: redis.Redis, seed: int) -> None:
    await _agree(redis_client, seed)


async def test_a_version_that_does_not_become_the_object_is_noticed(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault put back."""
    monkeypatch.setattr(_Bucket, "promote", lambda state, key: None)
    with pytest.raises(AssertionError, match="after step"):
        await _agree(redis_client, 0)
