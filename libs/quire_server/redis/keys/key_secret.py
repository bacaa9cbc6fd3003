"""The secret for the derivation of chunk keys, stored in Redis, wrapped with the cluster's secret (RFC 3394).

The first gateway derives it from the cluster's secret, so that it can be restored after Redis has lost all data. It
does not change when the cluster's secret is replaced.
"""

from __future__ import annotations

import asyncio
import hmac
from typing import Final, cast

import redis.asyncio as redis
from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap

from quire.model.errors import ConfigInvalid, Unavailable
from quire.telemetry import logger
from quire_server.redis.connection import metadata_errors

_KEY: Final = "quire:key-secret"
_AGAIN_S: Final = 1.0


async def key_secret(client: redis.Redis, *secrets: bytes) -> bytes:
    """Read the secret; create it if Redis has none.

    Args:
        client: A client of the cluster's Redis.
        secrets: The cluster's secrets. The first one wraps the stored secret after this call.

    Returns:
        32 bytes.

    Raises:
        ConfigInvalid: None of `secrets` unwraps the stored secret.
    """
    initial = hmac.digest(secrets[0], b"quire chunk keys", "sha256")
    async with metadata_errors():
        await client.set(_KEY, _wrapped(initial, secrets[0]), nx=True)
        stored = cast(bytes, await client.get(_KEY))
    for cluster_secret in secrets:
        try:
            secret: bytes = aes_key_unwrap(_wrapping_key(cluster_secret), stored)
        except (InvalidUnwrap, ValueError):
            continue
        if cluster_secret != secrets[0]:
            async with metadata_errors():
                await client.set(_KEY, _wrapped(secret, secrets[0]))
        return secret
    raise ConfigInvalid(
        f"QUIRE_CLUSTER_SECRET does not open {_KEY} in Redis: set QUIRE_CLUSTER_SECRET_ALSO to the previous secret, or "
        f"delete {_KEY} there; then no tenant finds its stored objects"
    )


async def until_open(client: redis.Redis, *secrets: bytes) -> None:
    """Return once Redis answers, and this cluster's secret opens the secret there.

    Args:
        client: A client of the cluster's Redis.
        secrets: The cluster's secrets.

    Raises:
        ConfigInvalid: The data in Redis are of another secret.
    """
    is_said = False
    while True:
        try:
            await key_secret(client, *secrets)
            return
        except Unavailable as error:
            if not is_said:
                logger().warning("waits for Redis", error=str(error))
            is_said = True
            await asyncio.sleep(_AGAIN_S)


def _wrapped(secret: bytes, cluster_secret: bytes) -> bytes:
    return bytes(aes_key_wrap(_wrapping_key(cluster_secret), secret))


def _wrapping_key(cluster_secret: bytes) -> bytes:
    return hmac.digest(cluster_secret, b"quire key secret", "sha256")
