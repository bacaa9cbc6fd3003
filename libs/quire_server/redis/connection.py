"""Connecting to Redis, a Redis Cluster or what Sentinel watches; and their errors in Quire's words."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final, cast
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import redis.asyncio as redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import RedisClusterException, RedisError
from redis.maint_notifications import MaintNotificationsConfig

from quire.model.errors import ConfigInvalid, MetadataUnavailable

_CONNECTIONS_MAX: Final = 64
_TLS_OPTIONS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")


def connect(url: str, timeout_s: float = 5.0) -> redis.Redis:
    """A client for one Redis, a Redis Cluster, or the master that Sentinel names; all have the same commands.

    `redis://user:password@host:port/database`, `rediss://` with TLS, `unix://`; `redis+cluster://host:port,host:port`,
    `rediss+cluster://`: some of its nodes, which tell of the others; `redis+sentinel://host:port,host:port/service`,
    `rediss+sentinel://`: the Sentinels. Options of TLS are in the query: `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`,
    `ssl_cert_reqs`, `ssl_check_hostname`.

    Connects at the first command; each has a deadline. At most 64 connections: a burst of commands waits for one, as
    long as a command may take, and is not refused. Raises `ConfigInvalid`.
    """
    common: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    # With notices of maintenance, as is the default, redis-py uses connections that the server has closed.
    common["maint_notifications_config"] = MaintNotificationsConfig(enabled=False)
    scheme, _, kind = urlsplit(url).scheme.partition("+")
    try:
        if not kind:
            pool = redis.BlockingConnectionPool.from_url(
                url, max_connections=_CONNECTIONS_MAX, timeout=timeout_s, **common
            )
            return redis.Redis.from_pool(pool)
        where = urlsplit(url)
        options = common | _credentials(where) | _tls(where, scheme)
        if kind == "cluster":
            nodes = [ClusterNode(host, port) for host, port in _hosts(where)]
            return cast(redis.Redis, _Cluster(startup_nodes=nodes, max_connections=3 * _CONNECTIONS_MAX, **options))
        if kind == "sentinel":
            return _by_sentinel(where, options)
    except (ValueError, RedisClusterException) as error:
        raise ConfigInvalid(f"{_without_password(url)}: {error}", field="redis_url") from None
    raise ConfigInvalid(f"{_without_password(url)}: there are +cluster and +sentinel", field="redis_url")


def is_cluster(client: redis.Redis) -> bool:
    """Whether it is a cluster: keys have slots, which commands and scripts do not cross."""
    return isinstance(client, RedisCluster)


class _Cluster(RedisCluster):
    """Commands and pipelines beyond a number at a time wait: redis-py refuses them.

    A pipeline that meets a slot which has moved sends commands: the two have turns of their own.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._commands, self._pipelines = (asyncio.Semaphore(_CONNECTIONS_MAX) for _ in range(2))

    async def execute_command(self, *arguments: Any, **options: Any) -> Any:
        async with self._commands:
            return await super().execute_command(*arguments, **options)

    def pipeline(self, transaction: Any = None, shard_hint: Any = None) -> Any:
        pipeline: Any = super().pipeline(transaction, shard_hint)
        execute = pipeline.execute

        async def in_turn(**options: Any) -> Any:
            async with self._pipelines:
                return await execute(**options)

        pipeline.execute = in_turn
        return pipeline


@contextlib.asynccontextmanager
async def metadata_errors() -> AsyncIterator[None]:
    """Turn what redis-py raises into `MetadataUnavailable`.

    Raises `CancelledError` where redis-py has lost one: it sends by `asyncio.wait_for`, which before Python 3.12 loses
    a cancellation that comes as it ends (cpython 86296).
    """
    task = asyncio.current_task()
    cancellations = task.cancelling() if task is not None else 0
    try:
        yield
    except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
        raise MetadataUnavailable(f"Redis: {error or type(error).__name__}") from error
    except RuntimeError as error:  # uvloop's, of a connection that closes as it is written to
        if "handler is closed" not in str(error):
            raise
        raise MetadataUnavailable("Redis: the connection is closed") from error
    if task is not None and task.cancelling() > cancellations:
        raise asyncio.CancelledError


def _by_sentinel(where: SplitResult, options: dict[str, Any]) -> redis.Redis:
    service = where.path.strip("/")
    if not service:
        raise ValueError("the service's name is missing: redis+sentinel://host:port/service")
    common = {name: value for name, value in options.items() if name.startswith(("socket_", "maint_"))}
    sentinel: Any = Sentinel(_hosts(where), sentinel_kwargs=common)  # type: ignore[no-untyped-call]
    return cast(redis.Redis, sentinel.master_for(service, **options))


def _hosts(where: SplitResult) -> list[tuple[str, int]]:
    """Parse the URL. Raises `ValueError`."""
    hosts = []
    for part in where.netloc.rpartition("@")[2].split(","):
        parts = urlsplit(f"//{part}")
        if not parts.hostname or not parts.port:
            raise ValueError(f"{part!r} is not host:port")
        hosts.append((parts.hostname, parts.port))
    return hosts


def _credentials(where: SplitResult) -> dict[str, Any]:
    user, colon, password = where.netloc.rpartition("@")[0].partition(":")
    credentials = {"username": unquote(user)} if user else {}
    return credentials | ({"password": unquote(password)} if colon else {})


def _tls(where: SplitResult, scheme: str) -> dict[str, Any]:
    if scheme not in ("redis", "rediss"):
        raise ValueError(f"{scheme} is neither redis nor rediss")
    options: dict[str, Any] = dict(parse_qsl(where.query))
    if unknown := options.keys() - set(_TLS_OPTIONS):
        raise ValueError(f"{', '.join(sorted(unknown))}; there are {', '.join(_TLS_OPTIONS)}")
    if "ssl_check_hostname" in options:
        options["ssl_check_hostname"] = options["ssl_check_hostname"].lower() in ("1", "true", "yes")
    return options | ({"ssl": True} if scheme == "rediss" else {})


def _without_password(url: str) -> str:
    where = urlsplit(url)
    return where._replace(netloc=where.netloc.rpartition("@")[2]).geturl()
