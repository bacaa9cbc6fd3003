"""Configuration of a storage node that cannot work is refused at the start."""

from __future__ import annotations

import pytest

from quire.model.errors import ConfigInvalid
from quire_server.config import load
from quire_storage.config import PREFIX, StorageConfig


def test_slabs_must_be_as_drives_are_aligned() -> None:
    environment = {"QUIRE_CLUSTER_SECRET": "s" * 32, "QUIRE_STORAGE_SLAB_BYTES": str((64 << 20) + 512)}
    with pytest.raises(ConfigInvalid, match="multiple of 4096"):
        load(StorageConfig, PREFIX, environment)
