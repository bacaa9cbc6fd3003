"""What benchmarks compare with does what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import obstore

from quire_bench.gateway.bare_http import BareHttp
from quire_bench.gateway.s3 import run_servers
from quire_bench.storage.bare_device import BareDevice, best


def _bytes(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files if file.exists())


async def test_the_bare_device_moves_what_it_is_asked_for(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    files = [folder / "bare.bin" for folder in folders]
    for folder in folders:
        folder.mkdir()
    device = BareDevice([str(folder) for folder in folders], 64 << 20, 16)
    await device.start()
    try:
        assert _bytes(files) == 64 << 20
        rounds = [await device.rates(64 << 20, write=write) for write in (False, True)]
    finally:
        await device.close()
    assert all(rates.keys() == set(device.ways) and min(rates.values()) > 0 for rates in rounds)
    assert best([{"slow": 1.0, "quick": 9.0}, {"slow": 2.0, "quick": 8.0}]) == [9.0, 8.0]
    assert not _bytes(files)


def test_another_server_and_the_ceiling_are_measured() -> None:
    """The ceiling stands in for the other server here: they come out near each other, and every client is served."""

    async def measure() -> None:
        async with BareHttp(64 << 10) as bare:
            store = obstore.store.S3Store(
                "any",
                endpoint=bare.url,
                access_key_id="key",
                secret_access_key="secret",
                client_options={"allow_http": True},
            )
            await obstore.put_async(store, "one", b"x" * 100, use_multipart=False)
            assert len(await (await obstore.get_async(store, "one")).bytes_async()) == 64 << 10
            report = await asyncio.to_thread(run_servers, bare.url, ("key", "secret"), 64 << 10, 8)
            operations = [(row.params["client"], row.params["operation"]) for row in report.rows]
            assert operations == [(client, name) for client in ("boto3", "obstore") for name in ("PUT", "GET")]
            assert all(row.baseline > 0 and row.measured["ceiling, MB/s"] > 0 for row in report.rows)

    asyncio.run(measure())
