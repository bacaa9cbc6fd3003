"""Runs the scripts of the prefix index, and keeps the links from parents to children in other index buckets."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import redis.asyncio as redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import NoScriptError

from quire.model.fingerprints import PRINT_BYTES
from quire_server.redis.connection import is_cluster, metadata_errors
from quire_server.redis.prefix_index.slots import LINKS, bucket_key, bucket_keys, bucket_of_page
from quire_server.redis.scripts import names, script

LINK_BYTES: Final = 8
LINK_MS: Final = 30_000
"""For how long a child may be registered once its parent is kept for it."""
_SCANNED: Final = 16
"""Pages read at a time, of up to 256 chunks each, so that reading them does not hold up other requests."""
_LINKS_SCANNED: Final = 1000
_LINKS_READ: Final = 1024
_BUCKETS_AT_ONCE: Final = 256
"""Of 256 new roots a registration takes Redis 3 ms, for which other requests wait."""
_MASTER_SHIFT: Final = 56


class BucketScripts:
    """The scripts on single index buckets. `draw` makes the random bytes of generations and links."""

    def __init__(self, client: redis.Redis, *, draw: Callable[[int], bytes] = os.urandom) -> None:
        self._client = client
        self._cluster = is_cluster(client)
        self._draw = draw
        self._scripts = {name: client.register_script(script(f"index_{name}")) for name in names("index")}

    # ---- links

    async def _unlink(self, orphaned: Sequence[bytes], now_ms: int) -> None:
        """Parents in other buckets have lost a child: (parent, bucket and link's name, child, its leases), flat."""
        while orphaned:
            parent, link, child, leases, *rest = orphaned
            bucket, name = link[:PRINT_BYTES], link[PRINT_BYTES:]
            orphaned = [*rest, *await self._change("unlink", bucket, [parent, child, name, now_ms, leases])]

    async def repair(self, cursor: int, *, older_ms: int | None = None) -> tuple[int, int]:
        """Remove links, of a page of buckets, that no child has, because a registration or removal was cut short.

        Args:
            cursor: 0, or the cursor that the previous call returned.
            older_ms: Age in ms, by Redis' clock, from which a link is removed; two minutes by default. A younger one
                may await its child.

        Returns:
            How many were removed, and the next cursor, 0 at the end.
        """
        async with metadata_errors():
            names, next_cursor = await self._scan(cursor, LINKS, "hash", _LINKS_SCANNED)
            seconds, _ = await self._time()
            oldest_ms = seconds * 1000 - (4 * LINK_MS if older_ms is None else older_ms)
            removed = 0
            for name in names:
                at = 0
                while True:
                    at, links = cast(Any, await self._client.hscan(name, at, count=_LINKS_READ))
                    old = [link for link, made_ms in links.items() if int(made_ms) < oldest_ms]
                    removed += await self._remove_links(bucket_of_page(name), old)
                    if not at:
                        break
        return removed, next_cursor

    async def _remove_links(self, bucket: bytes, links: Sequence[bytes]) -> int:
        ends = [(link[:PRINT_BYTES], link[PRINT_BYTES:-LINK_BYTES], link[-LINK_BYTES:]) for link in links]
        calls = [([bucket_key(child)], [child]) for _, child, _ in ends]
        answers = await self._all("link_of", calls) if calls else []
        dangling = [end for end, link in zip(ends, answers, strict=True) if link != bucket + end[2]]
        for parent, child, name in dangling:
            await self._unlink([parent, bucket + name, child, b""], 0)
        return len(dangling)

    # ---- calls

    async def _change(self, name: str, bucket: bytes, arguments: list[Any]) -> Any:
        return (await self._change_each(name, [(bucket, arguments)]))[0]

    async def _change_each(
        self, name: str, calls: Sequence[tuple[bytes, list[Any]]], common: Sequence[Any] = ()
    ) -> list[Any]:
        """A script for several buckets, in order: one call of one Redis for as many as it may be held up by.

        `common`: arguments before those of each bucket.
        """
        if self._cluster:  # which has to know all keys: their slot may be moving
            apart = [(bucket_keys(bucket), [len(common), 1, *common, *arguments]) for bucket, arguments in calls]
            return [answer for (answer,) in await self._all(name, apart)] if apart else []
        answers: list[Any] = []
        for at in range(0, len(calls), _BUCKETS_AT_ONCE):
            part = calls[at : at + _BUCKETS_AT_ONCE]
            keys = [bucket_key(bucket) for bucket, _ in part]
            own = [argument for _, arguments in part for argument in arguments]
            answers += await self._run(name, keys, [len(common), len(part), *common, *own])
        return answers

    async def _run(self, name: str, keys: list[bytes], arguments: list[Any]) -> Any:
        async with metadata_errors():
            return await self._scripts[name](keys=keys, args=arguments)

    async def _all(self, name: str, calls: Sequence[tuple[list[bytes], list[Any]]]) -> list[Any]:
        """A script for several sets of keys, in one pipeline. A call that was executed is not repeated."""
        if len(calls) == 1:
            return [await self._run(name, *calls[0])]
        async with metadata_errors():
            answers = await self._piped(name, calls)
            if unknown := [at for at, answer in enumerate(answers) if isinstance(answer, NoScriptError)]:
                await self._client.script_load(self._scripts[name].script)
                repeated = await self._piped(name, [calls[at] for at in unknown])
                for at, answer in zip(unknown, repeated, strict=True):
                    answers[at] = answer
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            return answers

    async def _piped(self, name: str, calls: Sequence[tuple[list[bytes], list[Any]]]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for keys, arguments in calls:
            pipeline.execute_command("EVALSHA", self._scripts[name].sha, len(keys), *keys, *arguments)
        return list(await pipeline.execute(raise_on_error=False))

    async def _scan(self, cursor: int, pattern: bytes, kind: str, count: int = 0) -> tuple[list[bytes], int]:
        """Return a page of keys. A Cluster's masters are scanned in turn; the cursor's upper bits number the master."""
        if not self._cluster:
            scanned = await self._client.scan(cursor, match=pattern, count=count or _SCANNED, _type=kind)
            next_cursor, names = cast(tuple[int, list[bytes]], scanned)
            return names, int(next_cursor)
        cluster = await cast(RedisCluster, self._client).initialize()
        masters = sorted(cluster.get_primaries(), key=lambda node: str(node.name))
        number, at = cursor >> _MASTER_SHIFT, cursor & ((1 << _MASTER_SHIFT) - 1)
        if number >= len(masters):
            return [], 0
        master = masters[number]
        scanning: Any = cluster.scan(at, match=pattern, count=count or _SCANNED, _type=kind, target_nodes=master)
        cursors, names = await scanning
        if next_cursor := int(cursors[master.name]):
            return names, (number << _MASTER_SHIFT) | next_cursor
        return names, (number + 1) << _MASTER_SHIFT if number + 1 < len(masters) else 0

    async def _time(self) -> tuple[int, int]:
        if not self._cluster:
            return await self._client.time()
        cluster = await cast(RedisCluster, self._client).initialize()
        return await cluster.time(target_nodes=RedisCluster.RANDOM)
