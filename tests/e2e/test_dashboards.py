"""Dashboards and alerts: every query is put to a real Prometheus that scrapes a cluster at work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from quire.client import AsyncClient, ImageClient
from quire.model.descriptor import DeliveryOrder
from quire.model.errors import QuireError
from quire.model.hashing import block_keys
from quire.model.latents import LatentInfo, Normalisation, Vae
from quire_decoder.adapters.weights import weights_digest
from quire_tools.local import LocalCluster
from quire_tools.local.ports import free_ports
from tests.e2e.helpers import fetch_all, fresh_namespace, random_payload, store

ROOT = Path(__file__).resolve().parents[2] / "observability"
DASHBOARDS = sorted((ROOT / "grafana/dashboards").glob("*.json"))


def _panels() -> list[tuple[str, str]]:
    found = []
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text())["panels"]:
            found += [(panel["title"], target["expr"]) for target in panel.get("targets", [])]
    return found


def _alerts() -> list[tuple[str, str]]:
    groups = yaml.safe_load((ROOT / "alerts.yaml").read_text())["groups"]
    return [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"] if "alert" in rule]


def _recorded() -> dict[str, str]:
    groups = yaml.safe_load((ROOT / "alerts.yaml").read_text())["groups"]
    return {rule["record"]: rule["expr"] for group in groups for rule in group["rules"] if "record" in rule}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, vae: Path) -> Iterator[LocalCluster]:
    settings = {"QUIRE_DECODER_MODELS": str(vae)}
    folder = tmp_path_factory.mktemp("watched")
    with LocalCluster(folder, decoders=1, storage_nodes=2, arena_bytes=64 << 20, settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(cluster: LocalCluster, vae: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of one that has scraped the cluster, under load, for some seconds."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus here (Debian: apt install prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((ROOT / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": sorted(cluster.metrics.values())}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    # Alerts wait for nothing here: what is tested is that they fire at all.
    alerts = re.sub(r"for: \w+", "for: 0s", (ROOT / "alerts.yaml").read_text())
    (folder / "alerts.yaml").write_text(alerts)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    log = (folder / "log").open("wb")
    running = subprocess.Popen(
        [
            program,
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
        ],
        stdout=log,
        stderr=log,
    )
    try:
        asyncio.run(_work(cluster, vae, seconds=8))
        yield f"http://{address}"
    finally:
        running.terminate()
        running.wait(20)
        log.close()


async def _work(cluster: LocalCluster, vae: Path, *, seconds: float) -> None:
    """Everything that a dashboard shows: look-ups that hit and miss, both orders, images, something refused."""
    namespace, at = fresh_namespace(), 0
    async with AsyncClient(cluster.gateway_address) as client:
        images = ImageClient(client)
        values = np.random.default_rng(1).standard_normal((4, 16, 16)).astype(np.float16)
        info = LatentInfo((4, 16, 16), "float16", Vae("tiny", "", weights_digest(vae)), 64, 64, Normalisation())
        await images.put("watched", values, info)
        await images.get("watched")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            at += 1
            keys = block_keys(namespace, [at, *range(12 * 16 - 1)])
            await store(client, namespace, keys.run(0, 8), random_payload(namespace, 8))
            for order in (DeliveryOrder.LAYERWISE, DeliveryOrder.CHUNKWISE):
                found = await client.lookup(namespace, keys)
                await fetch_all(client, found, order)
                await client.release(found)
            await images.get("watched")
            with contextlib.suppress(QuireError):
                await images.get("absent")
            await asyncio.sleep(0.05)


def test_every_metric_that_is_asked_for_is_told(cluster: LocalCluster, vae: Path) -> None:
    """Without a Prometheus: what dashboards and alerts name is in what the services say, and each is alive."""
    asyncio.run(_work(cluster, vae, seconds=1))
    told = set()
    for address in cluster.metrics.values():
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            told |= {sample.name for family in families for sample in family.samples}
        with urllib.request.urlopen(f"http://{address}/healthz", timeout=10) as answer:
            assert answer.read() == b"ok"
    queries = [query for _, query in [*_panels(), *_alerts(), *_recorded().items()]]
    asked = {name for query in queries for name in re.findall(r"(?<!:)\b(?:quire|rpc)_\w+", query)}
    labels = {"rpc_method", "rpc_response_status_code", "quire_frontend"}
    told.add("quire_gateway_tenant_bytes")  # of tenants with something in flight
    told.add("quire_certificate_expiry_seconds")  # of those who speak TLS
    assert len(asked) > 25
    assert asked - labels <= told, sorted(asked - labels - told)


def _ask(url: str, path: str, **query: str) -> Any:
    text = urllib.parse.urlencode(query)
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{text}", timeout=10) as answer:
        said = json.load(answer)
    assert said["status"] == "success", said
    return said["data"]


@pytest.mark.parametrize(("title", "query"), _panels())
def test_a_panel_shows_something(prometheus: str, title: str, query: str) -> None:
    result = _ask(prometheus, "query", query=query)["result"]
    assert result, f"{title}: {query}"
    assert any(sample["value"][1] != "NaN" for sample in result), f"{title}: {query} gives {result[:3]}"


def test_every_target_is_up(prometheus: str, cluster: LocalCluster) -> None:
    up = {
        sample["metric"]["instance"]: sample["value"][1] for sample in _ask(prometheus, "query", query="up")["result"]
    }
    assert up == dict.fromkeys(cluster.metrics.values(), "1")


def test_alerts_are_loaded_and_silent(prometheus: str) -> None:
    """On a healthy cluster none fires, and none has a query that cannot be answered."""
    groups = _ask(prometheus, "rules")["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert rules.keys() == {name for name, _ in _alerts()} | _recorded().keys()
    for name, rule in rules.items():
        assert rule["health"] == "ok", f"{name}: {rule}"
        assert rule.get("state", "inactive") == "inactive", f"{name}: {rule}"


def test_alerts_fire_on_series_that_they_are_for() -> None:
    """Every alert, by Prometheus' own test of rules; and none on a failure among few requests."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool here (Debian: apt install prometheus)")
    file = ROOT / "alerts_test.yaml"
    done = subprocess.run(
        [program, "test", "rules", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cases = [case for test in yaml.safe_load(file.read_text())["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == {name for name, _ in _alerts()}


def test_an_alert_fires_when_its_time_has_come(prometheus: str, cluster: LocalCluster) -> None:
    """A storage node that is killed is a target that is down."""
    cluster.kill("storage-1")
    try:
        deadline, firing = time.monotonic() + 20, set[str]()
        while "QuireServiceDown" not in firing and time.monotonic() < deadline:
            time.sleep(0.5)
            alerts = _ask(prometheus, "alerts")["alerts"]
            firing = {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}
        assert "QuireServiceDown" in firing
    finally:
        cluster.restart("storage-1")
