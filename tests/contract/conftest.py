"""Fixtures that several contract tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis.asyncio as redis

from tests.contract.bucket_scene import Scene


@pytest.fixture(params=["redis_client", "redis_cluster_client", "memory"])
def bucket_redis(request: pytest.FixtureRequest) -> redis.Redis | None:
    """Return a client of Redis, or of a Redis Cluster; None for buckets in memory."""
    return request.getfixturevalue(request.param) if request.param != "memory" else None


@pytest.fixture
async def bucket_scene(bucket_redis: redis.Redis | None, tmp_path: Path) -> Scene:
    """Return an empty bucket "b" of tenant "t"."""
    scene = Scene(bucket_redis, tmp_path / "objects")
    await scene.buckets.create("t", "b", 0.0)
    return scene
