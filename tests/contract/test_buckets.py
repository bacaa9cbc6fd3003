"""Buckets, on a real Redis and in memory, and a real folder: what is acknowledged is kept, the rest goes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio as redis

from quire.model.buckets import CommitOutcome
from quire.model.errors import MetadataUnavailable, QuotaExceeded
from quire.model.policy import ENTRY_BYTES
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.s3.backend import ObjectBackend
from quire_gateway.s3.body import Body
from quire_gateway.s3.checksums import BodyChecks
from quire_gateway.s3.listing import list_objects
from tests.contract.bucket_scene import PLAIN, ReadBytes, Scene, body

PART = 5 << 20


@pytest.fixture
def scene(bucket_scene: Scene) -> Scene:
    return bucket_scene


async def _upload(scene: Scene, key: str, parts: dict[int, bytes]) -> tuple[str, list[tuple[int, str]]]:
    upload_id = await scene.backend.start_upload(key, PLAIN)
    tags = [
        (number, (await scene.backend.put_part(key, upload_id, number, body(data))).etag)
        for number, data in parts.items()
    ]
    return upload_id, tags


async def test_what_is_replaced_or_deleted_goes_after_a_while(scene: Scene) -> None:
    await scene.backend.put("k", body(b"one"), PLAIN, "")
    await scene.backend.put("k", body(b"two"), PLAIN, "")
    await scene.backends.sweep()
    assert scene.files() == 2, "a reader may still be at it"
    await scene.later()
    assert (scene.files(), await scene.read("k")) == (1, b"two")
    await scene.backend.delete("k", "")
    await scene.later()
    assert scene.files() == 0
    assert await scene.buckets.drop("t", "b", 0)
    await scene.backends.sweep()
    assert await scene.buckets.everywhere() == []


async def test_what_a_tenant_has_stored_is_counted(scene: Scene) -> None:
    """Objects, parts and uploads: as they come, are replaced, become objects, and are removed."""
    await scene.buckets.create("t", "other", 0.0)
    other = ObjectBackend("t", "other", buckets=scene.buckets, blobs=scene.blobs, clock=scene.clock)

    async def check(entries: int, size: int) -> None:
        assert await scene.buckets.stored_bytes("t") == ENTRY_BYTES * (2 + entries) + size, "two are the buckets"

    await check(0, 0)
    await scene.backend.put("k", body(b"x" * 300), PLAIN, "")
    await other.put("k", body(b"x" * 70_000), PLAIN, "")
    await check(2, 70_300)
    await other.put("k", body(b"x" * 5), PLAIN, "")
    await check(2, 70_305)
    await scene.later()
    await check(2, 305)
    upload_id, tags = await _upload(scene, "m", {1: b"a" * PART, 2: b"b" * 7, 3: b"c"})
    await check(6, 305 + PART + 8)
    await scene.backend.put_part("m", upload_id, 3, body(b"cc"))
    await scene.backend.complete("m", upload_id, tags[:2], "")
    await check(3, 305 + PART + 7 + 3)
    await scene.later()
    await check(3, 305 + PART + 7)
    upload_id, _ = await _upload(scene, "k", {1: b"a" * 1000})
    await check(5, 1305 + PART + 7)
    await scene.backend.abort("k", upload_id)
    await scene.backend.delete("m", "")
    await scene.backend.delete("m", "")
    await check(2, 1305 + PART + 7)
    await scene.later()
    await check(2, 305)
    await scene.backend.put("folder/", body(b""), PLAIN, "")
    await scene.backend.delete("folder/", "")
    upload_id, _ = await _upload(scene, "k", {1: b""})
    await scene.backend.abort("k", upload_id)
    await check(2, 305)
    if scene.client is not None:  # as an earlier release left it
        await scene.client.delete("quire:s3:{t/b}:charged")
        await scene.backend.put("n", body(b"x" * 20), PLAIN, "")
        await check(3, 325)
        await scene.backend.delete("n", "")
    await scene.backend.delete("k", "")
    await scene.later()
    assert await scene.buckets.drop("t", "b", 0)
    assert await scene.buckets.stored_bytes("t") == 2 * ENTRY_BYTES + 5
    assert await scene.buckets.stored_bytes("else") == 0


async def test_what_an_earlier_release_left_is_counted(bucket_redis: redis.Redis | None, scene: Scene) -> None:
    """Objects, uploads and their parts, when the sum is read or changed for the first time."""
    if bucket_redis is None:
        return
    await scene.backend.put("k", body(b"x" * 500), PLAIN, "")
    upload_id, tags = await _upload(scene, "m", {1: b"a" * PART, 2: b"b" * 7})
    await bucket_redis.delete("quire:s3:{t/b}:charged")
    assert await scene.buckets.stored_bytes("t") == 5 * ENTRY_BYTES + 500 + PART + 7
    await bucket_redis.delete("quire:s3:{t/b}:charged")
    await scene.backend.complete("m", upload_id, tags, "")
    assert await scene.buckets.stored_bytes("t") == 3 * ENTRY_BYTES + 500 + PART + 7
    upload_id, _ = await _upload(scene, "n", {1: b"a" * 1000})
    await bucket_redis.delete("quire:s3:{t/b}:charged")
    await scene.backend.abort("n", upload_id)
    for key in ("k", "m"):
        await scene.backend.delete(key, "")
    await scene.later()
    assert await scene.buckets.stored_bytes("t") == ENTRY_BYTES


async def test_sums_are_counted_anew_while_releases_are_mixed(bucket_redis: redis.Redis | None, scene: Scene) -> None:
    """Blobs are removed before the sum is counted; a gateway of an earlier release removes one without its waste."""
    if bucket_redis is None:
        return
    for key in ("k", "l"):
        await scene.backend.put(key, body(b"x" * 500), PLAIN, "")
        await scene.backend.delete(key, "")
    (oldest, *_) = await scene.buckets.garbage("t", "b", 1 << 62, 1)
    await bucket_redis.zrem("quire:s3:{t/b}:garbage", oldest)
    await bucket_redis.delete("quire:s3:{t/b}:charged")
    assert await scene.buckets.stored_bytes("t") == ENTRY_BYTES + 500
    await bucket_redis.delete("quire:s3:{t/b}:charged")
    await scene.later()
    assert await scene.buckets.stored_bytes("t") == ENTRY_BYTES


async def test_a_bucket_that_is_made_again_is_charged_for_nothing(scene: Scene) -> None:
    """Blobs of the dropped one are removed later."""
    await scene.backend.put("k", body(b"x" * 300), PLAIN, "")
    await scene.backend.delete("k", "")
    assert await scene.buckets.drop("t", "b", 0)
    await scene.buckets.create("t", "b", 0.0)
    await scene.backend.put("k", body(b"x" * 7), PLAIN, "")
    for _ in range(2):
        assert await scene.buckets.stored_bytes("t") == 2 * ENTRY_BYTES + 7
        await scene.later()


async def test_a_listing_reads_names_of_common_prefixes_alone(scene: Scene) -> None:
    """A page ends at the first key that has the delimiter behind the prefix."""
    for key in ("a/1", "a/x/1", "a/x/2", "a/y", "b"):
        await scene.backend.put(key, body(b"1"), PLAIN, "")
    page = await scene.buckets.page("t", "b", "a/", "", past=False, limit=10, delimiter="/")
    assert ([entry.key for entry in page.objects], page.common, page.more) == (["a/1"], "a/x/1", False)
    page = await scene.buckets.page("t", "b", "a/", "a/x/", past=True, limit=10, delimiter="/")
    assert ([entry.key for entry in page.objects], page.common) == (["a/y"], "")
    listing = await list_objects(scene.backend, "", "/", "", 10)
    assert (listing.prefixes, [entry.key for entry in listing.objects]) == (["a/"], ["b"])


class _Quota:
    """So much may be stored."""

    def __init__(self, buckets: Any, limit: int) -> None:
        self._buckets = buckets
        self._limit = limit

    @contextlib.asynccontextmanager
    async def reserve(self, tenant: str, more_bytes: int) -> AsyncIterator[None]:
        if await self._buckets.stored_bytes(tenant) + more_bytes > self._limit:
            raise QuotaExceeded("enough")
        yield


async def test_what_is_over_the_quota_is_refused_before_it_is_written(scene: Scene) -> None:
    quota = _Quota(scene.buckets, 1000 + 4 * ENTRY_BYTES)  # a bucket, two objects, an upload
    backend = ObjectBackend("t", "b", buckets=scene.buckets, blobs=scene.blobs, clock=scene.clock, quotas=quota)
    entry = await backend.put("k", body(b"x" * 600), PLAIN, "")
    upload_id = await backend.start_upload("m", PLAIN)
    written = scene.files()
    for refused in (
        backend.put("l", body(b"x" * 401), PLAIN, ""),
        backend.copy("k", entry, backend, PLAIN, "", ""),
        backend.put_part("m", upload_id, 1, body(b"x" * 401)),
        backend.copy_part("m", upload_id, 1, 600, backend.read(entry, 0, 600)),
    ):
        with pytest.raises(QuotaExceeded):
            await refused
    assert scene.files() == written
    await backend.put("l", body(b"x" * 400), PLAIN, "")


async def test_complete_and_abort_at_once(scene: Scene) -> None:
    """Whichever comes first: the object is whole, or there is none."""
    for round_number in range(20):
        key = f"k{round_number}"
        upload_id, tags = await _upload(scene, key, {1: b"a" * PART, 2: b"b"})
        done = await asyncio.gather(
            scene.backend.complete(key, upload_id, tags, ""),
            scene.backend.abort(key, upload_id),
            return_exceptions=True,
        )
        await scene.later()
        if isinstance(done[0], BaseException):
            assert isinstance(done[0], S3Error) and await scene.backend.head(key) is None
        else:
            assert await scene.read(key) == b"a" * PART + b"b"
    assert await scene.backend.uploads() == []


async def test_a_part_again_while_it_is_completed(scene: Scene) -> None:
    for round_number in range(20):
        key = f"k{round_number}"
        upload_id, tags = await _upload(scene, key, {1: b"same"})
        done = await asyncio.gather(
            scene.backend.complete(key, upload_id, tags, ""),
            scene.backend.put_part(key, upload_id, 1, body(b"same")),
            return_exceptions=True,
        )
        await scene.later()
        if isinstance(done[0], BaseException):
            assert isinstance(done[0], S3Error) and done[0].code == "InvalidPart"
        else:
            assert await scene.read(key) == b"same"


async def test_a_second_complete_answers_as_the_first(scene: Scene) -> None:
    """Its client heard no answer. What has come since stays."""
    upload_id, tags = await _upload(scene, "k", {1: b"a" * PART, 2: b"b"})
    both = [scene.backend.complete("k", upload_id, tags, "") for _ in range(2)]
    first, second = await asyncio.gather(*both)
    assert first == second
    await scene.backend.put("k", body(b"newer"), PLAIN, "")
    assert await scene.backend.complete("k", upload_id, tags, "") == first
    assert await scene.backend.was_completed("k", upload_id, tags), "its conditions held then, and are not asked again"
    assert not await scene.backend.was_completed("k", upload_id, tags[:1])
    assert await scene.read("k") == b"newer"
    for wrong in (("k", upload_id, tags[:1]), ("other", upload_id, tags), ("k", "never", tags)):
        with pytest.raises(S3Error) as failed:
            await scene.backend.complete(*wrong, "")
        assert failed.value.code == "NoSuchUpload"


@pytest.mark.parametrize("call", ["upload", "parts"])
async def test_a_complete_that_another_overtakes_answers_as_it(
    scene: Scene, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one ends before the first or the second call."""
    upload_id, tags = await _upload(scene, "k", {1: b"a" * PART, 2: b"b"})
    method = getattr(scene.buckets, call)

    async def overtaken(*arguments: Any) -> Any:
        monkeypatch.undo()
        await scene.backend.complete("k", upload_id, tags, "")
        return await method(*arguments)

    monkeypatch.setattr(scene.buckets, call, overtaken)
    assert await scene.backend.complete("k", upload_id, tags, "") == await scene.backend.complete(
        "k", upload_id, tags, ""
    )


async def test_a_bucket_goes_with_its_unfinished_uploads(scene: Scene) -> None:
    upload_id, _ = await _upload(scene, "k", {1: b"a" * PART, 2: b"b"})
    await _upload(scene, "l", {1: b"c"})
    await scene.backend.put("x", body(b"x"), PLAIN, "")
    assert not await scene.buckets.drop("t", "b", scene.clock.now_ms())
    await scene.backend.delete("x", "")
    assert await scene.buckets.drop("t", "b", scene.clock.now_ms())
    for late in (scene.backend.put_part("k", upload_id, 3, body(b"late")), scene.backend.start_upload("k", PLAIN)):
        with pytest.raises(S3Error) as failed:
            await late
        assert failed.value.code == "NoSuchBucket"
    await scene.later()
    assert scene.files() == 0
    assert await scene.buckets.create("t", "b", 0.0)
    assert await scene.backend.uploads() == []


async def test_stale_uploads_are_aborted(scene: Scene) -> None:
    """After seven days, and looked for once an hour; an upload that goes on is left alone."""
    await _upload(scene, "stale", {1: b"a" * PART})
    scene.backends._upload_s = 7 * 86_400.0
    await scene.clock.advance(6 * 86_400)
    fresh, _ = await _upload(scene, "fresh", {1: b"b" * PART})
    await scene.backends.sweep()
    assert len(await scene.backend.uploads()) == 2
    await scene.clock.advance(1.1 * 86_400)
    await scene.backends.sweep()
    assert [upload.upload_id for upload in await scene.backend.uploads()] == [fresh]
    await scene.later()
    assert scene.files() == 1, "the parts of the stale one are gone"


async def test_two_completes_with_other_parts(scene: Scene) -> None:
    upload_id, tags = await _upload(scene, "k", {1: b"a" * PART, 2: b"b"})
    done = await asyncio.gather(
        scene.backend.complete("k", upload_id, tags, ""),
        scene.backend.complete("k", upload_id, tags[:1], ""),
        return_exceptions=True,
    )
    assert sum(isinstance(each, S3Error) for each in done) == 1
    await scene.later()
    assert await scene.read("k") in (b"a" * PART + b"b", b"a" * PART)
    assert scene.files() == len((await scene.backend.head("k")).blobs)  # type: ignore[union-attr]


async def test_a_commit_whose_answer_is_lost(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis has done it, and the answer was lost: the object is there, and stays."""
    await scene.backend.put("k", body(b"before"), PLAIN, "")
    put = scene.buckets.put

    async def unheard(*arguments: Any) -> int:
        await put(*arguments)
        raise MetadataUnavailable("timed out")

    monkeypatch.setattr(scene.buckets, "put", unheard)
    with pytest.raises(MetadataUnavailable):
        await scene.backend.put("k", body(b"after"), PLAIN, "")
    monkeypatch.undo()
    await scene.later()
    assert await scene.read("k") == b"after"

    async def undone(*arguments: Any) -> int:
        raise MetadataUnavailable("down")

    monkeypatch.setattr(scene.buckets, "put", undone)
    with pytest.raises(MetadataUnavailable):
        await scene.backend.put("k", body(b"never"), PLAIN, "")
    monkeypatch.undo()
    await scene.later()
    assert (await scene.read("k"), scene.files()) == (b"after", 1)


async def test_a_body_that_is_not_what_was_announced_leaves_nothing(scene: Scene) -> None:
    short = Body(ReadBytes(b"abc"), 5, BodyChecks({}, ""), None)
    wrong = Body(ReadBytes(b"abc"), 3, BodyChecks({"sha256": "A" * 43 + "="}, ""), None)
    for bad in (short, wrong):
        with pytest.raises(S3Error):
            await scene.backend.put("k", bad, PLAIN, "")
    assert await scene.backend.head("k") is None
    await scene.later()
    assert scene.files() == 0


async def test_an_upload_slower_than_a_day_is_refused(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blobs were garbage for so long that they went: an object of them must not be."""
    put = scene.buckets.put

    async def much_later(*arguments: Any) -> CommitOutcome:
        await scene.later()
        outcome: CommitOutcome = await put(*arguments)
        return outcome

    monkeypatch.setattr(scene.buckets, "put", much_later)
    with pytest.raises(S3Error) as failed:
        await scene.backend.put("k", body(b"x"), PLAIN, "")
    assert failed.value.code == "RequestTimeout"
    assert await scene.backend.head("k") is None


async def test_one_writer_wins(scene: Scene) -> None:
    done = await asyncio.gather(
        *(scene.backend.put("k", body(bytes([number])), PLAIN, "absent") for number in range(10)),
        return_exceptions=True,
    )
    assert sum(not isinstance(each, BaseException) for each in done) == 1
    won = next(number for number, each in enumerate(done) if not isinstance(each, BaseException))
    await scene.later()
    assert (await scene.read("k"), scene.files()) == (bytes([won]), 1)


async def test_listings_while_keys_are_deleted(scene: Scene) -> None:
    """A key whose entry is gone when it is looked up shortens a page, and ends nothing."""
    keys = [f"{number:03}" for number in range(40)] + [f"d/{number}/x" for number in range(60)]
    for key in keys:
        await scene.backend.put(key, body(b"x"), PLAIN, "")
    await scene.lose(keys[3:12])
    left = sorted(set(keys) - set(keys[3:12]))
    for limit in (1, 2, 7, 1000):
        found, after = [], ""
        while True:
            listing = await list_objects(scene.backend, "", "", after, limit)
            found += [entry.key for entry in listing.objects]
            if not listing.truncated:
                break
            after = listing.last
        assert found == left
        folders, after = [], ""
        while True:
            listing = await list_objects(scene.backend, "d/", "/", after, limit)
            folders += listing.prefixes
            if not listing.truncated:
                break
            after = listing.last
        assert folders == sorted(f"d/{number}/" for number in range(60))


async def test_sweeping_goes_on_past_what_is_missing(scene: Scene) -> None:
    """Blobs that were never written, or that another gateway has removed, keep none of the others."""
    now = scene.clock.now_ms()
    await scene.buckets.abandon("t", "b", [hashlib.sha256(bytes([n])).hexdigest()[:32] for n in range(30)], now)
    for number in range(30):
        await scene.backend.put(f"k{number}", body(b"x"), PLAIN, "")
        await scene.backend.delete(f"k{number}", "")
    await scene.later()
    assert scene.files() == 0
    with pytest.raises(S3Error):
        await ObjectBackend("t", "never", buckets=scene.buckets, blobs=scene.blobs, clock=scene.clock).put(
            "k", body(b"x"), PLAIN, ""
        )
    assert await scene.buckets.everywhere() == [("t", "b")]
