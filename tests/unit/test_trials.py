"""What people try first starts: every service takes the values that compose and the Kubernetes trial bring along."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import yaml

from quire.model.errors import ConfigInvalid
from quire_server.config import SECRET_BYTES_MIN, load
from quire_storage.config import PREFIX, StorageConfig
from tests.unit.configs import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
SECRETS = {
    "compose.yaml": r"QUIRE_CLUSTER_SECRET:-([^}]+)}",
    "k8s/overlays/dev/kustomization.yaml": r"QUIRE_CLUSTER_SECRET=([^]\s]+)",
}


@pytest.mark.parametrize("file", SECRETS)
def test_the_trial_secret_is_taken(file: str) -> None:
    found = re.search(SECRETS[file], (ROOT / file).read_text())
    assert found is not None, file
    for module, name in CONFIGS.items():
        kind = getattr(importlib.import_module(f"{module}.config"), name)
        load(kind, module.upper(), {"QUIRE_CLUSTER_SECRET": found[1]})
        if hasattr(kind, "cluster_secret"):
            with pytest.raises(ConfigInvalid, match="QUIRE_CLUSTER_SECRET"):
                load(kind, module.upper(), {"QUIRE_CLUSTER_SECRET": "s" * (SECRET_BYTES_MIN - 1)})


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
