"""The catalogue of images on a real Redis: pages, uses of records, and unused ones."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import cbor2
import pytest
import redis.asyncio as redis

from quire.model.errors import ConditionFailed, ImageMissing, QuotaExceeded
from quire.model.images import ExpectedImage, ImageEntry, record_name
from quire.model.keys import ChunkKeys
from quire.model.policy import ENTRY_BYTES
from quire.model.provenance import GENERATED
from quire.testing.clock import FakeClock
from quire_orchestrator.images import ImageDesk
from quire_server.clock import SystemClock
from quire_server.redis import Images, RunningDecodes


def _entry(name: str, content: str = "") -> ImageEntry:
    digest = hashlib.sha256((content or name).encode()).digest()
    return ImageEntry(name, digest, 1000, digest, "", 64, 64)


def _desk(client: redis.Redis, evict: Any, clock: Any, quotas: Any = None) -> ImageDesk:
    """Return a desk without decoders."""
    decodes = RunningDecodes(client, lasts_ms=60_000)
    return ImageDesk(
        catalogue=Images(client), decodes=decodes, theta=4, decoders=list, evict=evict, clock=clock, quotas=quotas
    )


async def test_pages_go_on_past_what_was_deleted_meanwhile(any_redis: redis.Redis) -> None:
    images = Images(any_redis)
    for number in range(25):
        await images.put("", _entry(f"a-{number:02}"))
    await images.put("", _entry("b"))
    first, after = await images.list("", "a", "", 10)
    assert [entry.image_id for entry in first] == [f"a-{number:02}" for number in range(10)]
    await any_redis.hdel("quire:{images}:entries", *(f"a-{number}" for number in range(10, 20)))
    second, after = await images.list("", "a", after, 10)
    assert second == []
    third, after = await images.list("", "a", after, 10)
    assert [entry.image_id for entry in third] == [f"a-{number}" for number in range(20, 25)]
    assert after == ""


async def test_a_record_in_use_goes_later(any_redis: redis.Redis) -> None:
    """Deleted during a read: it stays until the read ends, unless an image uses it again."""
    leased: set[bytes] = set()
    gone: list[bytes] = []

    async def evict(key: ChunkKeys) -> bool:
        if key.at(0) in leased:
            return False
        gone.append(key.at(0))
        return True

    images = Images(any_redis)
    desk = _desk(any_redis, evict, SystemClock())
    one, other = _entry("one", "same"), _entry("other", "same")
    await desk.put("", one, ExpectedImage())
    await desk.put("", other, ExpectedImage())
    leased.add(one.keys.at(0))
    assert await desk.delete("", "one")
    assert await images.unused(10) == [], "the other uses it"
    assert await desk.delete("", "other")
    assert await images.unused(10) == [one.record_sha256]
    await desk.sweep()
    assert not gone
    await desk.put("", one, ExpectedImage())
    assert await images.unused(10) == [], "used again"
    await desk.delete("", "one")
    leased.clear()
    await desk.sweep()
    assert gone == [one.keys.at(0)]
    assert await images.unused(10) == []


async def test_what_a_tenant_has_stored_is_counted(any_redis: redis.Redis) -> None:
    """Lengths of records, as images come, are replaced and go."""
    images = Images(any_redis)
    for number, size in enumerate((20, 200, 60_000, 70_000)):
        await images.put("t", replace(_entry(f"{number}"), record_bytes=size))
    await images.put("u", _entry("0"))
    assert (await images.stored_bytes("t"), await images.stored_bytes("u")) == (
        130_220 + 4 * ENTRY_BYTES,
        1000 + ENTRY_BYTES,
    )
    await images.put("t", replace(_entry("3"), record_bytes=1))
    with pytest.raises(ConditionFailed):
        await images.put("t", _entry("2"), ExpectedImage(absent=True))
    await images.delete("t", "2")
    await images.delete("t", "2")
    assert await images.stored_bytes("t") == 221 + 3 * ENTRY_BYTES
    await any_redis.delete("quire:{images}:charged")  # as an earlier release left it
    await any_redis.hset("quire:{images}:stored", "t", 221)
    assert await images.tenants() == ["t"] and await images.stored_bytes("t") == 221 + 3 * ENTRY_BYTES
    await any_redis.delete("quire:{images}:charged")
    await images.delete("t", "0")
    assert await images.stored_bytes("t") == 201 + 2 * ENTRY_BYTES
    assert await images.tenants() == ["t"]


async def test_tenants_have_ids_of_their_own(any_redis: redis.Redis) -> None:
    """Records of the same name are shared: one that another image has stays."""
    images = Images(any_redis)
    mine, theirs = _entry("cat", "same"), _entry("cat", "same")
    assert await images.put("a", mine) is None
    assert await images.put("b", theirs) is None
    await images.put("", _entry("dog"))
    assert [each.image_id for each in (await images.list("a", "", "", 10))[0]] == ["cat"]
    assert [each.image_id for each in (await images.list("", "", "", 10))[0]] == ["dog"]
    assert await images.delete("a", "dog") is None
    assert await images.get("c", "cat") is None
    assert await images.delete("a", "cat") == mine
    assert not await images.release(mine.record_sha256)
    assert await images.get("b", "cat") == theirs


async def test_a_tenants_record_is_its_own(any_redis: redis.Redis) -> None:
    """Equal records of two tenants have names of their own, and go one by one."""
    images = Images(any_redis)
    mine, theirs = (
        replace(_entry("cat", "same"), record_name=record_name(b"secret", tenant, _entry("cat", "same").record_sha256))
        for tenant in ("a", "b")
    )
    assert mine.keys != theirs.keys
    for tenant, entry in (("a", mine), ("b", theirs), ("", _entry("dog", "same"))):
        await images.put(tenant, entry)
        assert await images.get(tenant, entry.image_id) == entry
    assert await images.delete("a", "cat") == mine
    assert await images.release(mine.record_name) and await images.unused(10) == [mine.record_name]
    assert await images.stored_bytes("b") == 1000 + ENTRY_BYTES


async def test_what_is_expected_is_looked_at_as_it_is_put(any_redis: redis.Redis) -> None:
    """A refusal changes nothing; the record that came for nothing is unused, unless an image has it."""
    images = Images(any_redis)
    one, two, three = _entry("cat", "1"), _entry("cat", "2"), _entry("cat", "3")
    with pytest.raises(ConditionFailed):
        await images.put("", one, ExpectedImage(record_sha256=one.record_sha256))
    assert await images.unused(10) == [one.record_sha256]
    assert await images.put("", one, ExpectedImage(absent=True)) is None
    assert await images.unused(10) == []
    for expected in (ExpectedImage(absent=True), ExpectedImage(record_sha256=two.record_sha256)):
        with pytest.raises(ConditionFailed):
            await images.put("", one, expected)
        assert await images.get("", "cat") == one
    assert await images.unused(10) == [], "the image has it"
    assert await images.put("", two, ExpectedImage(record_sha256=one.record_sha256)) == one
    with pytest.raises(ConditionFailed):
        await images.put("", three, ExpectedImage(record_sha256=one.record_sha256))
    assert await images.unused(10) == [three.record_sha256]


@pytest.mark.parametrize("since_ms", [0, 500])
async def test_an_image_whose_time_is_over_counts_as_none(any_redis: redis.Redis, since_ms: int) -> None:
    """A GET said that there was none, and `If-None-Match: *` that there was one, until the entry was swept."""
    images = Images(any_redis)
    one = replace(_entry("cat", "1"), created_ms=1000, expires_ms=2000)
    await images.put("", one)
    early, late = (replace(_entry("cat", "2"), created_ms=at) for at in (1999, 2000 + since_ms))
    with pytest.raises(ConditionFailed):
        await images.put("", early, ExpectedImage(absent=True))
    with pytest.raises(ConditionFailed):
        await images.put("", late, ExpectedImage(record_sha256=one.record_sha256))
    assert await images.put("", late, ExpectedImage(absent=True)) == one, "its record is used once less"
    assert await images.expired(10_000, 10) == [] and await images.get("", "cat") == late


@pytest.mark.parametrize("used", [True, False])
async def test_a_record_beyond_the_quota_is_unused_unless_an_image_has_it(any_redis: redis.Redis, used: bool) -> None:
    class Full:
        def reserve(self, tenant: str, more_bytes: int) -> Any:
            raise QuotaExceeded("enough")

    images = Images(any_redis)
    full: Any = Full()
    desk = _desk(any_redis, full, SystemClock(), quotas=full)
    entry = _entry("a")
    if used:
        await images.put("t", entry)
    with pytest.raises(QuotaExceeded):
        await desk.put("t", entry, ExpectedImage())
    assert await images.unused(10) == ([] if used else [entry.record_sha256])


async def test_ids_are_listed_in_the_order_of_their_bytes(any_redis: redis.Redis) -> None:
    """Also those beyond Latin, behind a prefix, page by page."""
    images = Images(any_redis)
    ids = sorted(
        ["a", "a/b", "a/\xff", "a/\u732b", "a/\U0001f431", "b", "\u732b", "\u732b/1", "\u732b/2"], key=str.encode
    )
    for each in reversed(ids):
        await images.put("", _entry(each))
    for prefix in ("", "a", "a/", "\u732b", "\u732b/", "c"):
        found, after = list[str](), ""
        while True:
            page, after = await images.list("", prefix, after, 2)
            found += [entry.image_id for entry in page]
            if not after:
                break
        assert found == [each for each in ids if each.startswith(prefix)], prefix


async def test_images_go_when_their_time_is_up(any_redis: redis.Redis) -> None:
    """Not those that were put again meanwhile; an entry of before there were times is read as it was."""
    clock, images, gone = FakeClock(), Images(any_redis), list[bytes]()

    async def evict(key: ChunkKeys) -> bool:
        gone.append(key.at(0))
        return True

    desk = _desk(any_redis, evict, clock)
    brief, again, kept = (
        replace(_entry(name), metadata=(("z", "1"), ("a", "é")), provenance=GENERATED)
        for name in ("brief", "again", "kept")
    )
    await desk.put("t", brief, ExpectedImage(), 5_000)
    await desk.put("t", again, ExpectedImage(), 5_000)
    await desk.put("", kept, ExpectedImage())
    seen = await desk.head("t", "brief")
    assert (seen.metadata, seen.provenance) == ((("a", "é"), ("z", "1")), GENERATED)
    await clock.advance(5)
    await desk.put("t", again, ExpectedImage(), 5_000)
    with pytest.raises(ImageMissing):
        await desk.head("t", "brief")
    assert [each.image_id for each in (await desk.list("t", "", "", 10))[0]] == ["again"]
    await desk.sweep()
    assert gone == [brief.keys.at(0)] and await images.get("t", "brief") is None
    stale = replace(again, expires_ms=1)
    assert await images.delete("t", "again", stale) is None, "another one is there by now"
    await desk.put("t", again, ExpectedImage())
    await clock.advance(100)
    await desk.sweep()
    assert await desk.head("t", "again") and await desk.head("", "kept")
    stored: Any = await any_redis.hget("quire:{images}:entries", "kept")
    raw = cbor2.loads(stored)
    for fields, metadata in ((7, ()), (9, (("a", "é"), ("z", "1")))):
        await any_redis.hset("quire:{images}:entries", "kept", cbor2.dumps(raw[:fields]))
        old = await images.get("", "kept")
        assert old == replace(kept, created_ms=raw[6], metadata=metadata, provenance="")
