"""What people try first starts: every service takes the values that compose and the Kubernetes trial bring along."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from quire.model.errors import ConfigInvalid
from quire_server.config import SECRET_BYTES_MIN, load
from tests.unit.test_readme import CONFIGS

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
