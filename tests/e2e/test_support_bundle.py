"""`quire support-bundle`: what is in it, of a cluster that works and of one that is frozen, and that no secret is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tarfile
from pathlib import Path

import pytest

from quire_tools.local import LocalCluster
from tests import fork_server
from tests.e2e.test_cli import quire
from tests.polling import until


def _read(file: Path) -> dict[str, str]:
    """Return the texts of a bundle by their names in it."""
    with tarfile.open(file) as archive:
        members = [(member, archive.extractfile(member)) for member in archive]
        return {member.name.partition("/")[2]: opened.read().decode() for member, opened in members if opened}


def test_it_has_everything_but_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "start_service", lambda *_: None)  # a fork's environment is its parent's
    settings = {
        "UCX_NOTE": "redis://user:hunter2@ss@host:1/0?password=hunter3",
        "AWS_SECRET_ACCESS_KEY": "hunter4",
        "AWS_PROFILE": "default",
        "AWS_SSE_CUSTOMER_KEY_BASE64": "hunter5",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=hunter6",
    }
    leaks = "hunter4 redis://:hunter'7@host:1 https://hunter8@host"
    with LocalCluster(tmp_path / "c", arena_bytes=64 << 20, settings=settings) as cluster:
        log, arguments = cluster.folder / "logs" / "gateway.log", ("--folder", str(cluster.folder))
        log.write_text(log.read_text() + f"leaked {cluster.secret} and {leaks}\n")
        redis = cluster.pid("redis")
        done = quire("support-bundle", str(tmp_path / "one.tar.gz"), *arguments)
        assert done.returncode == 0, done.stderr
        texts = _read(tmp_path / "one.tar.gz")
        assert texts.keys() >= {
            *("about.json", "machine.json", "health.json", "status.json"),
            *("settings/gateway.txt", "metrics/storage-0.txt", "logs/gateway.log", "logs/storage-0.log"),
        }
        _check_no_secret(texts, cluster.secret)
        assert "QUIRE_CLUSTER_SECRET=(hidden)" in texts["settings/gateway.txt"]
        assert "QUIRE_REDIS_URL=unix:" in texts["settings/orchestrator.txt"]
        assert "leaked (hidden)" in texts["logs/gateway.log"]
        assert "where the tasks are" in texts["logs/storage-0.log"]
        assert "AWS_PROFILE=(hidden)" in texts["settings/gateway.txt"]
        assert '"link": "default"' in texts["status.json"], "a short word that may be a secret is not removed elsewhere"
        assert {node["role"] for node in json.loads(texts["status.json"])} >= {"storage", "gateway", "scheduler"}
        assert "quire_cluster_health" in texts["metrics/orchestrator.txt"]
        os.kill(redis, 0)
        until(lambda: quire("health", *arguments).returncode == 0, "every process has survived it")
        os.kill(cluster.pid("orchestrator"), signal.SIGSTOP)
        try:
            frozen = quire("support-bundle", str(tmp_path / "two.tar.gz"), *arguments, "--timeout-s", "1")
            assert frozen.returncode == 0, frozen.stderr
        finally:
            os.kill(cluster.pid("orchestrator"), signal.SIGCONT)
        texts = _read(tmp_path / "two.tar.gz")
        assert json.loads(texts["health.json"])["checks"][0]["code"] == "UNREACHABLE"
        assert "logs/orchestrator.log" in texts
        elsewhere = quire("support-bundle", str(tmp_path / "four.tar.gz"), "--gateway", "127.0.0.1:9")
        assert elsewhere.returncode == 0, elsewhere.stderr
        assert not [name for name in _read(tmp_path / "four.tar.gz") if name.startswith("logs/")]
        secret = cluster.secret
    ended = quire("support-bundle", str(tmp_path / "three.tar.gz"), *arguments)
    assert ended.returncode == 0, ended.stderr
    texts = _read(tmp_path / "three.tar.gz")
    assert "logs/gateway.log" in texts
    assert secret not in "\n".join(texts.values())
    refused = quire("support-bundle", str(tmp_path / "nowhere" / "four.tar.gz"), *arguments)
    assert refused.returncode == 1 and "No such file" in refused.stderr


def _check_no_secret(texts: dict[str, str], secret: str) -> None:
    everything = "\n".join(texts.values())
    assert secret not in everything
    assert "hunter" not in everything, [line for line in everything.splitlines() if "hunter" in line]


def test_a_process_that_has_the_number_of_one_that_ended_is_left_alone(tmp_path: Path) -> None:
    """The machine was restarted, say, and the cluster's state is as it was."""
    with subprocess.Popen(["sleep", "60"], env={"QUIRE_NOTE": "of another program"}) as stranger:
        state = {"processes": {"gateway": [stranger.pid, "127.0.0.1:1"]}, "metrics": {}, "admin": "127.0.0.1:9"}
        (tmp_path / "cluster.json").write_text(json.dumps(state))
        (tmp_path / "secret").write_text("secret-of-this-cluster")
        done = quire("support-bundle", str(tmp_path / "one.tar.gz"), "--folder", str(tmp_path), "--timeout-s", "1")
        assert done.returncode == 0, done.stderr
        assert stranger.poll() is None
        assert not [name for name in _read(tmp_path / "one.tar.gz") if name.startswith("settings/")]
        stranger.kill()
