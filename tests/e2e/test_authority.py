"""A new authority replaces the former one in the steps of docs/operations/security.md; new connections serve."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest

from quire.client import AsyncClient
from quire.model.errors import NodeUnavailable
from quire.wire.tls import Tls
from quire_server.access import certs
from quire_tools.local import LocalCluster
from tests import fork_server
from tests.e2e.helpers import fetch_all, fresh_namespace, random_payload, some_keys, store

_LOOKS_S = 2.0
"""Members look for other files once a second, when the next connection is made."""


async def _serves(cluster: LocalCluster, ca: Path) -> None:
    """Store and fetch over a new connection that trusts an authority."""
    async with AsyncClient(cluster.tls_address, tls=Tls(ca)) as client:
        namespace = fresh_namespace()
        keys, payload = some_keys(namespace, 2), random_payload(namespace, 2)
        await store(client, namespace, keys, payload)
        assert np.array_equal((await fetch_all(client, await client.lookup(namespace, keys)))[0], payload)


def _made(folder: Path, *trusted: Path) -> None:
    options = [option for file in trusted for option in ("--trust", str(file))]
    done = fork_server.run(fork_server.quire("certs", folder, *options), timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
async def test_another_authority_takes_over(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "cluster", tls=True, decoders=0, storage_nodes=2, arena_bytes=64 << 20) as cluster:
        used, new, former = cluster.folder / "certs", tmp_path / "new", tmp_path / "former.pem"
        shutil.copy(used / "ca.pem", former)
        await _serves(cluster, former)

        async def all_serve(*clients: Path) -> None:
            """New connections of clients and of members: a gateway and a storage node begin anew."""
            await asyncio.sleep(_LOOKS_S)
            for name in ("gateway", "storage-1"):
                await asyncio.to_thread(cluster.renew, name, 60)
            for ca in clients:
                await _serves(cluster, ca)

        certs.make(new, [], 30)
        _made(used, new / "ca.pem")
        await all_serve(former, used / "ca.pem")
        _made(new, former)
        shutil.copytree(new, used, dirs_exist_ok=True)
        await all_serve(used / "ca.pem", new / "ca.pem")
        _made(used)
        await all_serve(used / "ca.pem")
        async with AsyncClient(cluster.tls_address, tls=Tls(former), timeout_s=10) as client:
            with pytest.raises(NodeUnavailable):
                await client.status()


def test_an_authority_that_is_none_is_refused(tmp_path: Path) -> None:
    """`quire certs` writes nothing then."""
    (tmp_path / "empty.pem").write_text("no certificate")
    for name in ("empty.pem", "absent.pem"):
        command = fork_server.quire("certs", tmp_path / "certs", "--trust", tmp_path / name)
        done = fork_server.run(command, timeout=60)
        assert done.returncode == 1 and f"{name} has no certificates" in done.stderr, done
    assert not (tmp_path / "certs").exists()
