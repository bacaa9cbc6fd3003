"""Which libucp is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyucx import _library, library

SYSTEM, WHEEL, NIXL = "system", "libucx-cu12 wheel", "nixl wheel"


def _place(folder: Path, name: str, *, rdma: bool) -> Path:
    (folder / "ucx").mkdir(parents=True)
    (folder / name).touch()
    if rdma:
        (folder / "ucx" / "libuct_ib.so.0").touch()
    return folder / name


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All three are installed; the system's and that of nixl have the transport for RDMA."""
    monkeypatch.delenv("PYUCX_LIBUCP", raising=False)
    system = _place(tmp_path / "system", "libucp.so.0", rdma=True)
    wheel = _place(tmp_path / "wheel", "libucp.so.0", rdma=False)
    nixl = _place(tmp_path / "nixl", "libucp-1a2b.so.0.0.0", rdma=True)
    (tmp_path / "nixl" / "libibverbs-3c4d.so.1").touch()
    monkeypatch.setattr(_library, "system_library", lambda: system)
    monkeypatch.setattr(_library, "wheel_library", lambda: wheel)
    monkeypatch.setattr(_library, "nixl_library", lambda: nixl)
    return tmp_path


@pytest.mark.parametrize(
    ("drivers", "version", "order"),
    [
        (set(), (1, 18), [WHEEL, NIXL, SYSTEM]),
        ({"mlx5_core"}, (1, 18), ["system, with RDMA", "nixl wheel, with RDMA", WHEEL, NIXL, SYSTEM]),
        ({"mlx5_core"}, (1, 13), ["nixl wheel, with RDMA", "system, with RDMA", WHEEL, NIXL, SYSTEM]),
        ({"rxe0"}, (1, 13), ["system, with RDMA", WHEEL, NIXL, SYSTEM]),
    ],
)
@pytest.mark.usefixtures("machine")
def test_the_order(
    drivers: set[str], version: tuple[int, int], order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_library, "device_drivers", lambda: set(drivers))
    monkeypatch.setattr(_library, "version_of", lambda path: version)
    assert [origin for origin, _ in _library.candidates()] == order


def test_a_device_has_the_name_of_its_driver_or_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "_DEVICES", tmp_path / "infiniband")
    assert not _library.device_drivers()
    (tmp_path / "drivers" / "mlx5_core").mkdir(parents=True)
    for device in ("mlx5_0", "rxe0"):
        (tmp_path / "infiniband" / device / "device").mkdir(parents=True)
    (tmp_path / "infiniband" / "mlx5_0" / "device" / "driver").symlink_to(tmp_path / "drivers" / "mlx5_core")
    assert _library.device_drivers() == {"mlx5_core", "rxe0"}


def test_a_library_may_be_forced(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYUCX_LIBUCP", "/some/libucp.so.0")
    assert _library.candidates() == [("PYUCX_LIBUCP", Path("/some/libucp.so.0"))]


def test_a_nixl_wheel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nixl_cu12").mkdir()
    (tmp_path / "nixl_cu12" / "__init__.py").touch()
    libucp = _place(tmp_path / "nixl_cu12.libs", "libucp-1a2b.so.0.0.0", rdma=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert _library.nixl_library() == libucp and _library.has_transport(libucp)


def test_a_version_is_read_without_loading_it_here() -> None:
    assert _library.version_of(library.path) == library.version[:2]
    assert _library.version_of(Path(__file__)) == (0, 0)


def test_the_one_of_an_installed_nixl_wheel_works() -> None:
    """In a process of its own; run where nixl is installed."""
    nixl = _library.nixl_library()
    if nixl is None:
        pytest.skip("no nixl wheel is installed here")
    program = "import asyncio; from pyucx.selftest import gathers_correctly; print(asyncio.run(gathers_correctly()))"
    environment = os.environ | {"PYUCX_LIBUCP": str(nixl)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.split() == ["True"], done.stderr
