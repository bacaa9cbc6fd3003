"""The sweep deletes what lifecycle rules end, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.model.buckets import VersionsPage
from quire_gateway.s3 import lifecycle
from tests.contract.bucket_scene import PLAIN, Scene, body
from tests.contract.test_bucket_versions import ENABLED

_RULES = b"""<LifecycleConfiguration>
<Rule><Filter><Prefix>old/</Prefix></Filter><Status>Enabled</Status>
<Expiration><Days>2</Days></Expiration>
<NoncurrentVersionExpiration><NoncurrentDays>1</NoncurrentDays></NoncurrentVersionExpiration>
<AbortIncompleteMultipartUpload><DaysAfterInitiation>1</DaysAfterInitiation></AbortIncompleteMultipartUpload></Rule>
<Rule><Filter/><Status>Enabled</Status>
<Expiration><ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker></Expiration></Rule>
</LifecycleConfiguration>"""


@pytest.fixture
async def scene(bucket_scene: Scene) -> Scene:
    """Return a bucket with the rules."""
    await bucket_scene.buckets.set("t", "b", lifecycle.SETTING, lifecycle.read_lifecycle(_RULES)[1])
    return bucket_scene


async def _days(scene: Scene, days: float) -> None:
    await scene.clock.advance(days * 86_400)
    await scene.backends.sweep()


async def test_objects_and_uploads_expire(scene: Scene) -> None:
    await scene.backend.put("old/1", body(b"1"), PLAIN, "")
    await scene.backend.put("kept", body(b"2"), PLAIN, "")
    for key in ("old/upload", "upload"):
        await scene.backend.start_upload(key, PLAIN)
    await _days(scene, 1.9)
    assert await scene.backend.head("old/1") is not None
    await scene.backend.put("old/2", body(b"3"), PLAIN, "")
    await _days(scene, 1.2)
    assert [entry.key for entry in (await scene.backend.page("", "", False, 10)).objects] == ["kept", "old/2"]
    assert [upload.key for upload in await scene.backend.uploads()] == ["upload"]
    for _ in range(2):
        await scene.later()
    assert scene.files() == 1, "the bytes go too; old/2 is old by now"


async def test_versions_and_markers_expire(scene: Scene) -> None:
    """An expired object leaves a marker and a version; the version goes, and then the marker that hides nothing."""
    await scene.buckets.set("t", "b", "versioning", ENABLED)
    await scene.backend.put("old/1", body(b"1"), PLAIN, "")
    kinds = []
    for _ in range(8):
        await _days(scene, 1.0)
        page = await scene.backend.versions("", "", "", False, 10)
        kinds.append("".join("m" if version.is_marker else "v" for version in page.versions))
    assert "mv" in kinds and "m" in kinds[kinds.index("mv") :] and not kinds[-1], kinds


async def test_a_bucket_whose_rules_fail_stops_no_other(scene: Scene) -> None:
    await scene.buckets.create("t", "a", 0.0)
    await scene.buckets.set("t", "a", lifecycle.SETTING, b"<broken>")
    await scene.backend.put("old/1", body(b"1"), PLAIN, "")
    await _days(scene, 4)
    assert await scene.backend.head("old/1") is None


async def test_two_gateways_expire_at_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sweeps that read the same object make one delete marker."""
    await scene.buckets.set("t", "b", "versioning", ENABLED)
    await scene.backend.put("old/1", body(b"1"), PLAIN, "")
    await scene.clock.advance(4 * 86_400)
    rules, _ = lifecycle.read_lifecycle(_RULES)
    now_s, versions, both_have_read = scene.clock.now_ms() / 1e3, scene.buckets.versions, asyncio.Barrier(2)

    async def versions_together(*arguments: Any) -> VersionsPage:
        page: VersionsPage = await versions(*arguments)
        await both_have_read.wait()
        return page

    with monkeypatch.context() as patched:
        patched.setattr(scene.buckets, "versions", versions_together)
        async with asyncio.timeout(30):
            counts = await asyncio.gather(*(lifecycle.apply(scene.backend, rules, now_s) for _ in range(2)))
    listed = (await scene.backend.versions("", "", "", False, 10)).versions
    assert [version.is_marker for version in listed] == [True, False] and sorted(counts) == [0, 1]
