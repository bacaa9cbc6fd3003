"""Trials start, and are open to other hosts only where they are configured to be."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import yaml

from quire.model.errors import ConfigInvalid
from quire_gateway.config import PREFIX as GATEWAY_PREFIX
from quire_gateway.config import GatewayConfig
from quire_server.config import SECRET_BYTES_MIN, load, read
from quire_storage.config import PREFIX, StorageConfig
from tests.unit.configs import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = "a-public-secret-for-trials-never-for-production"


def test_trials_have_no_secret_that_others_know() -> None:
    """Neither the compose file nor the manifests bring one along."""
    files = [ROOT / "compose.yaml", *(ROOT / "k8s").rglob("*.yaml")]
    assert len(files) > 10
    assert not [file for file in files if re.search(r"CLUSTER_SECRET(=|:-|: *)[\"']?[\w-]{8}", file.read_text())]


@pytest.mark.parametrize(("module", "name"), CONFIGS.items())
def test_a_public_secret_serves_this_host_alone(module: str, name: str) -> None:
    """Nor is one taken that is too short."""
    kind, prefix = getattr(importlib.import_module(f"{module}.config"), name), f"{module.upper()}_"
    if not hasattr(kind, "cluster_secret"):
        return
    for host in ("127.0.0.1", "[::1]", "localhost"):
        load(kind, prefix, {"QUIRE_CLUSTER_SECRET": PUBLIC, f"{prefix}LISTEN": f"{host}:7400"})
    for host in ("0.0.0.0", "10.0.0.1", "[::]", "quire.example"):
        open_to_others = {f"{prefix}LISTEN": f"{host}:7400", f"{prefix}ADVERTISE": "10.0.0.1:7400"}
        for variable in ("QUIRE_CLUSTER_SECRET", "QUIRE_CLUSTER_SECRET_ALSO"):
            secrets = {"QUIRE_CLUSTER_SECRET": "s" * SECRET_BYTES_MIN, variable: PUBLIC}
            _, problems = read(kind, prefix, open_to_others | secrets)
            assert any("this one is public" in problem for problem in problems), host
    for listener in ("ADMIN_LISTEN", "PAGE_LISTEN", "S3_LISTEN") if prefix == GATEWAY_PREFIX else ():
        _, problems = read(kind, prefix, {"QUIRE_CLUSTER_SECRET": PUBLIC, f"{prefix}{listener}": "0.0.0.0:7400"})
        assert any("this one is public" in problem for problem in problems), listener
    with pytest.raises(ConfigInvalid, match="QUIRE_CLUSTER_SECRET"):
        load(kind, prefix, {"QUIRE_CLUSTER_SECRET": "s" * (SECRET_BYTES_MIN - 1)})


@pytest.mark.parametrize("listener", ["LISTEN", "TLS_LISTEN", "HTTP_LISTEN", "HTTP_TLS_LISTEN"])
def test_a_gateway_without_tokens_serves_this_host_alone(listener: str) -> None:
    """Unless it is configured for everyone who reaches it."""
    settings = {"QUIRE_CLUSTER_SECRET": "s" * SECRET_BYTES_MIN, "QUIRE_GATEWAY_ADVERTISE": "10.0.0.1:7410"}
    for host, auth, refused in (
        ("0.0.0.0", "off", True),
        ("0.0.0.0", "tokens", False),
        ("0.0.0.0", "everyone", False),
        ("127.0.0.1", "off", False),
    ):
        changed = {f"QUIRE_GATEWAY_{listener}": f"{host}:7400", "QUIRE_GATEWAY_AUTH": auth}
        _, problems = read(GatewayConfig, GATEWAY_PREFIX, settings | changed)
        assert any("QUIRE_GATEWAY_AUTH" in problem for problem in problems) == refused, (host, auth)


def test_a_secret_is_read_from_a_file(tmp_path: Path) -> None:
    """Compose and Kubernetes mount secrets as files; the variable itself wins over its file."""
    file = tmp_path / "secret"
    file.write_text("f" * SECRET_BYTES_MIN + "\n")
    named = {"QUIRE_CLUSTER_SECRET_FILE": str(file)}
    assert load(StorageConfig, PREFIX, named).cluster_secret == "f" * SECRET_BYTES_MIN
    variables = named | {"QUIRE_CLUSTER_SECRET": "v" * SECRET_BYTES_MIN}
    assert load(StorageConfig, PREFIX, variables).cluster_secret == "v" * SECRET_BYTES_MIN
    with pytest.raises(ConfigInvalid, match=r"QUIRE_CLUSTER_SECRET_FILE=.*cannot be read"):
        load(StorageConfig, PREFIX, {"QUIRE_CLUSTER_SECRET_FILE": str(tmp_path / "none")})


def test_compose_shares_memory_with_the_storage_services() -> None:
    """The second file names services of the first, and gives them what they take."""
    base, shared = (yaml.safe_load((ROOT / f"compose{part}.yaml").read_text()) for part in ("", ".shared-memory"))
    storage = {name for name, service in base["services"].items() if service.get("image") == "quire-storage"}
    assert shared["services"].keys() == storage
    for name, service in shared["services"].items():
        folder = service["environment"]["QUIRE_SHARED_MEMORY"]
        assert service["volumes"] == [f"{folder}:{folder}"], name
        uids = re.fullmatch(r"\$\{QUIRE_CLIENT_UIDS:-(.*)}", service["environment"]["QUIRE_SHARED_MEMORY_UIDS"])
        assert uids is not None
        environment = {"QUIRE_SHARED_MEMORY": folder, "QUIRE_SHARED_MEMORY_UIDS": uids[1]}
        config = load(StorageConfig, PREFIX, {"QUIRE_CLUSTER_SECRET": "s" * SECRET_BYTES_MIN, **environment})
        assert (config.shared_memory, config.shared_memory_users) == (folder, [0, 1000])
    with pytest.raises(ConfigInvalid, match="QUIRE_SHARED_MEMORY_UIDS"):
        load(StorageConfig, PREFIX, {"QUIRE_CLUSTER_SECRET": "s" * 32, "QUIRE_SHARED_MEMORY_UIDS": "root"})
