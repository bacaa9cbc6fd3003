"""Configuration of a storage node that cannot work is refused at the start."""

from __future__ import annotations

import pytest

from quire.model.errors import ConfigInvalid
from quire_server.config import load
from quire_storage.config import PREFIX, StorageConfig


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"SLAB_BYTES": 1 << 30, "ARENA_BYTES": 1 << 29}, "SLAB_BYTES.*more than QUIRE_STORAGE_ARENA_BYTES"),
        ({"SLAB_BYTES": 1 << 30, "DRIVE_BYTES": 1 << 29, "DRIVES": "/d"}, "more than QUIRE_STORAGE_DRIVE_BYTES"),
        ({"POOL_LOW_SHARE": 0.9, "POOL_HIGH_SHARE": 0.8}, "LOW_SHARE=0.9: above"),
        ({"POOL_HIGH_SHARE": 1.5}, "HIGH_SHARE='1.5': more than 1"),
        ({"IO": "fast"}, "IO='fast': one of auto, io_uring, threads"),
        ({"LISTEN": "0.0.0.0:7412"}, "set QUIRE_STORAGE_ADVERTISE"),
        ({"LISTEN": "7412"}, "LISTEN='7412': not host:port"),
        ({"ARENA_BYTE": 5}, "ARENA_BYTE='5': no such variable; did you mean QUIRE_STORAGE_ARENA_BYTES"),
        ({"OBJECT_LAG_BYTES": -5}, "less than 1"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, object], why: str) -> None:
    environment = {f"QUIRE_STORAGE_{name}": str(value) for name, value in settings.items()}
    with pytest.raises(ConfigInvalid, match=why):
        load(StorageConfig, PREFIX, {"QUIRE_CLUSTER_SECRET": "s" * 32, **environment})


def test_what_kubernetes_adds_is_not_unknown() -> None:
    added = {
        "QUIRE_STORAGE_SERVICE_HOST": "10.0.0.1",
        "QUIRE_STORAGE_PORT_7412_TCP_ADDR": "x",
        "QUIRE_GATEWAY_PORT": "y",
    }
    load(StorageConfig, PREFIX, {"QUIRE_CLUSTER_SECRET": "s" * 32, **added})


def test_slabs_must_be_as_drives_are_aligned() -> None:
    environment = {"QUIRE_CLUSTER_SECRET": "s" * 32, "QUIRE_STORAGE_SLAB_BYTES": str((64 << 20) + 512)}
    with pytest.raises(ConfigInvalid, match="multiple of 4096"):
        load(StorageConfig, PREFIX, environment)
