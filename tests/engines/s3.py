"""Keys and buckets for engines that speak S3."""

from __future__ import annotations

import time

from quire_server.redis import AccessKeys, S3Buckets, connect
from quire_tools.local import LocalCluster


async def access(cluster: LocalCluster, name: str, bucket: str) -> tuple[str, str]:
    """A key with its secret, and a bucket that it may use."""
    redis = connect(cluster.redis_url)
    keys = AccessKeys(redis, cluster.secret.encode())
    made = await keys.create(name, ())
    assert await S3Buckets(redis).create(name, bucket, time.time())
    await redis.aclose()
    return made.name, keys.secret(made)
