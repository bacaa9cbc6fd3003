"""The secret that tenants' chunk keys are derived with. Redis keeps it wrapped with the cluster's secret (RFC 3394).

The first gateway makes it out of the cluster's secret of that day, so that a Redis that lost everything gets the same
one again. It stays when the cluster's secret is replaced.
"""

from __future__ import annotations

import hmac
from typing import Final, cast

import redis.asyncio as redis
from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap

from quire.model.errors import ConfigInvalid
from quire_server.redis.connection import metadata_errors

_KEY: Final = "quire:key-secret"


async def key_secret(client: redis.Redis, *secrets: bytes) -> bytes:
    """Read it; make it if there is none.

    Args:
        client: Of the cluster's Redis.
        secrets: The cluster's, the first of which wraps from now on.

    Raises:
        ConfigInvalid: None of `secrets` opens what Redis has.
    """
    made = hmac.digest(secrets[0], b"quire chunk keys", "sha256")
    async with metadata_errors():
        await client.set(_KEY, _wrapped(made, secrets[0]), nx=True)
        kept = cast(bytes, await client.get(_KEY))
    for each in secrets:
        try:
            found: bytes = aes_key_unwrap(_wrapping_key(each), kept)
        except (InvalidUnwrap, ValueError):
            continue
        if each != secrets[0]:
            async with metadata_errors():
                await client.set(_KEY, _wrapped(found, secrets[0]))
        return found
    raise ConfigInvalid(
        f"QUIRE_CLUSTER_SECRET does not open {_KEY} in Redis: set QUIRE_CLUSTER_SECRET_ALSO to the secret before, or "
        f"delete {_KEY} there; then no tenant finds what it has stored"
    )


def _wrapped(secret: bytes, cluster_secret: bytes) -> bytes:
    return bytes(aes_key_wrap(_wrapping_key(cluster_secret), secret))


def _wrapping_key(cluster_secret: bytes) -> bytes:
    return hmac.digest(cluster_secret, b"quire key secret", "sha256")
