"""Pools in real files: what is refused at start, with which words, and that nothing of it is touched."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quire.model.errors import ConfigInvalid
from quire_storage.adapters import drives
from quire_storage.adapters.drives import FileDrives
from quire_storage.core.pool.format import pack_superblock, read_superblock
from quire_storage.errors import DriveUnusable, ForeignPool
from quire_storage.tiers.pool import Pool, PoolSettings

MIB = 1 << 20


def _pool(*folders: Path, node: str = "node", drive_bytes: int = 16 * MIB, slab_bytes: int = MIB) -> Pool:
    settings = PoolSettings(
        node_id=node, drive_bytes=drive_bytes, slab_bytes=slab_bytes, chunk_bytes_min=65536, stripe_bytes=65536
    )
    return Pool(settings, [str(folder) for folder in folders], FileDrives())


def _create(folder: Path) -> Path:
    pool = _pool(folder)
    pool.open()
    pool._drives.close()
    return folder / "pool.quire"


def test_a_pool_is_preallocated_and_opened_again(tmp_path: Path) -> None:
    file = _create(tmp_path)
    assert file.stat().st_blocks * 512 >= 15 * MIB, "no allocation on the hot path"
    same = _pool(tmp_path)
    same.open()
    before = same.map.capacity_bytes
    same._drives.close()
    larger = _pool(tmp_path, drive_bytes=64 * MIB)
    larger.open()
    assert 62 * MIB <= larger.map.capacity_bytes < 64 * MIB and before < 16 * MIB
    assert file.stat().st_blocks * 512 >= 62 * MIB
    larger._drives.close()
    smaller = _pool(tmp_path, drive_bytes=32 * MIB)
    with pytest.raises(ConfigInvalid, match=r"DRIVE_BYTES=33554432.*cannot be made smaller"):
        smaller.open()
    smaller._drives.close()
    again = _pool(tmp_path, drive_bytes=64 * MIB)
    again.open()
    assert again.map.capacity_bytes == larger.map.capacity_bytes
    assert not list(tmp_path.glob("*.new"))


@pytest.mark.parametrize("change", ["node", "version", "magic", "short", "text"])
def test_a_foreign_pool_is_never_touched(tmp_path: Path, change: str) -> None:
    file = _create(tmp_path)
    node = "node"
    raw = bytearray(file.read_bytes())
    if change == "node":
        node = "another"
    elif change == "version":
        from isal.isal_zlib import crc32

        for at in (0, 4096):
            raw[at + 12 : at + 16] = (99).to_bytes(4, "little")
            raw[at + 8 : at + 12] = crc32(bytes(raw[at + 12 : at + 4096])).to_bytes(4, "little")
    elif change == "magic":
        raw[:8] = raw[4096:4104] = b"FOREIGN!"
    elif change == "short":
        del raw[8 * MIB :]
    else:
        raw = bytearray(b"my diary")
    file.write_bytes(raw)
    with pytest.raises((ForeignPool, DriveUnusable), match=str(tmp_path)):
        _pool(tmp_path, node=node).open()
    assert file.read_bytes() == bytes(raw)


def test_a_device_that_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(DriveUnusable, match="too few for a slab"):
        _pool(tmp_path, drive_bytes=2 * MIB, slab_bytes=2 * MIB).open()
    with pytest.raises(DriveUnusable, match="no room for a pool"):
        _pool(tmp_path, drive_bytes=1 << 60).open()
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_drive_that_has_vanished(tmp_path: Path) -> None:
    """Its folder cannot be made: said at start, by name."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DriveUnusable, match="file/drive"):
        _pool(tmp_path / "file" / "drive").open()


def test_one_process_per_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drives, "_LOCK_S", 0.1)
    first = _pool(tmp_path)
    first.open()
    with pytest.raises(DriveUnusable, match="in use by another process"):
        _pool(tmp_path).open()
    first._drives.close()
    _pool(tmp_path).open()


def test_a_pool_that_is_let_go_of_late_is_waited_for(tmp_path: Path) -> None:
    first = _pool(tmp_path)
    first.open()
    letting_go = threading.Timer(0.3, first._drives.close)
    letting_go.start()
    assert len(_pool(tmp_path).open()) == 1
    letting_go.join()


def test_files_that_cannot_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network without locks: said, and not waited for."""

    def no_locks(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(DriveUnusable, match="cannot be locked: No locks available"):
        _pool(tmp_path).open()


_HOLDER = """
import sys
import threading
from pathlib import Path
from quire_storage.adapters.uring import UringBlockIO
from quire_storage.errors import BlockIOUnavailable
from tests.integration.test_drives import _pool
try:
    UringBlockIO(32, direct=False).init_queue(_pool(Path(sys.argv[1])).open(), [])
except BlockIOUnavailable as error:
    sys.exit(print(error))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_killed_process_pool_is_taken_over_at_once(tmp_path: Path) -> None:
    """Though io_uring holds its files for some milliseconds more."""
    command = [sys.executable, "-c", _HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        held = holder.stdout.readline()
        holder.kill()
        holder.wait(20)
        if held != "held\n":
            pytest.skip(f"no io_uring here: {held}")
        assert len(_pool(tmp_path).open()) == 1


def test_the_superblock_says_who_made_it(tmp_path: Path) -> None:
    head = _create(tmp_path).read_bytes()[:8192]
    block = read_superblock(head, "node", "x")
    assert pack_superblock(block) == head[:4096]
