"""Services as in a container that is locked up: another user, no capabilities, a root file system without writing."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quire.client import AsyncClient, ImageClient
from quire.model.durability import Durability
from quire_tools.local import LocalCluster
from quire_tools.local.pictures import encode, pictures
from tests.e2e.helpers import fetch_all, fresh_namespace, random_payload, some_keys, store

_USER = 10001
_CHUNKS = 24
# A home folder that only its owner enters may be where Python lies: reading, alone, is allowed everywhere.
_KEPT = "-all,+dac_read_search"


class _Confined(LocalCluster):
    """Each process has mounts of its own, in which nothing but the cluster's folders can be written to."""

    def wrapped(self, name: str, command: list[str]) -> list[str]:
        writable = [str(self.folder), *([self._socket_folder] if self._socket_folder else [])]
        steps = ["mount --make-rprivate /"]
        steps += [f"mount --bind {shlex.quote(each)} {shlex.quote(each)}" for each in writable]
        steps.append("mount -o remount,bind,ro /")
        steps.append(
            f"exec setpriv --reuid {_USER} --regid {_USER} --clear-groups --no-new-privs --bounding-set {_KEPT} "
            f"--inh-caps {_KEPT} --ambient-caps {_KEPT} {shlex.join(command)}"
        )
        for folder in writable:
            subprocess.run(["chown", "-R", str(_USER), folder], check=True)
        return ["unshare", "--mount", "sh", "-ec", "\n".join(steps)]


def _can_confine() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return False
    tried = ["unshare", "--mount", "sh", "-ec", "mount --make-rprivate / && mount -o remount,bind,ro /"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    if not _can_confine():
        pytest.skip("mounts of one's own, and other users, need root with util-linux")
    folder = tmp_path / "c"
    settings = {"TMPDIR": str(folder), "HOME": "/nowhere", "PYTHONDONTWRITEBYTECODE": "1"}
    with _Confined(folder, decoders=1, storage_nodes=2, arena_bytes=96 << 20, settings=settings) as running:
        yield running


@pytest.mark.slow
async def test_everything_works_without_root_and_without_writing_elsewhere(cluster: LocalCluster) -> None:
    for name in cluster.names:
        if name == "redis":
            continue
        about = Path(f"/proc/{cluster.pid(name)}")
        status = dict(line.split(":\t", 1) for line in (about / "status").read_text().splitlines() if ":\t" in line)
        assert status["Uid"].split() == [str(_USER)] * 4, name
        assert int(status["CapEff"], 16) == 1 << 2 and status["NoNewPrivs"] == "1", name
        roots = [line.split() for line in (about / "mountinfo").read_text().splitlines() if line.split()[4] == "/"]
        assert roots and all("ro" in each[5].split(",") for each in roots), name
    async with AsyncClient(cluster.gateway_address) as client:
        namespace = fresh_namespace()
        keys, payload = some_keys(namespace, _CHUNKS), random_payload(namespace, _CHUNKS)
        await store(client, namespace, keys, payload, durability=Durability.OBJECT)
        got, _ = await fetch_all(client, await client.lookup(namespace, keys))
        assert np.array_equal(got, payload)
        ((latent, info),) = encode(pictures(1, 64))
        images = ImageClient(client)
        await images.put("cat", latent, info)
        assert (await images.get("cat")).data
