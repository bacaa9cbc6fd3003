"""Finds and loads libucp, once per process, after configuring UCX to leave the process alone.

Order: `PYUCX_LIBUCP` (a path). On a machine with an RDMA device a library with UCX's transport for it: the system's
from 1.15 on, the one in the `nixl-cu12` or `nixl-cu13` wheel (for devices of mlx5), an older one of the system. Then
the `libucx-cu12` wheel, the `nixl` wheel, and the system's libucp.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import cffi

from pyucx._cdef import CDEF, STATUS_LAST
from pyucx.errors import LibraryNotFound

# Read by UCX when it is loaded, hence before dlopen. UCX must not install signal handlers or print backtraces, must not
# take SIGHUP, must not patch mmap (the memory handle is passed explicitly instead), and needs no thread for its VFS. By
# default it waits for a tcp connection inside the call: a machine that is off would hold up the loop for minutes.
_PROCESS_ENVIRONMENT: Final = {
    "UCX_ERROR_SIGNALS": "",
    "UCX_HANDLE_ERRORS": "none",
    "UCX_DEBUG_SIGNO": "0",
    "UCX_MEM_EVENTS": "n",
    "UCX_VFS_ENABLE": "n",
    "UCX_LOG_LEVEL": "fatal",
    "UCX_TCP_CONN_NB": "y",
}
_SYSTEM_FOLDERS: Final = (
    "/opt/ucx/lib",
    "/usr/local/lib",
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib",
)
_SONAME: Final = "libucp.so.0"
OLDEST: Final = (1, 13)
GATHERS: Final = (1, 15)
"""From this version on many slices in one put arrive correctly."""
_NIXL: Final = ("nixl_cu13", "nixl_cu12")
_DEVICES: Final = Path("/sys/class/infiniband")
_IN_WHEELS: Final = frozenset({"mlx5_core"})
_VERSION_S: Final = 20.0

ffi: Final[Any] = cffi.FFI()
ffi.cdef(CDEF)


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded library.

    `ucp` and `ucs` are cffi library handles, `version` is (major, minor, release), `origin` says where it came from.
    """

    ucp: Any
    ucs: Any
    version: tuple[int, int, int]
    path: Path
    origin: str

    @property
    def copies_headers(self) -> bool:
        """Whether UCX copies an active message's header at the call (since 1.14); if not it must be kept alive."""
        return self.version >= (1, 14, 0)

    @property
    def takes_memory_handles(self) -> bool:
        """Whether an operation accepts the memory handle of its local buffer (since 1.14)."""
        return self.version >= (1, 14, 0)


def system_library() -> Path | None:
    """Path of the system's libucp, None where there is none."""
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), *_SYSTEM_FOLDERS]
    return next((path for folder in folders if folder and (path := Path(folder) / _SONAME).exists()), None)


def wheel_library() -> Path | None:
    """Path of the `libucx-cu12` wheel's libucp, None where it is not installed."""
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "lib" / _SONAME
    return path if path.exists() else None


def nixl_library() -> Path | None:
    """Path of the libucp in a `nixl` wheel, None where none is installed. The wheel's tools have changed its name."""
    for name in _NIXL:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent.with_name(f"{name}.libs")
            if paths := sorted(folder.glob("libucp-*.so.*")):
                return paths[0]
    return None


def device_drivers() -> set[str]:
    """Return the kernel drivers of this machine's RDMA devices, as "mlx5_core"; of a device without one its name."""
    devices = _DEVICES.iterdir() if _DEVICES.is_dir() else ()
    return {(device / "device" / "driver").resolve().name if _has_driver(device) else device.name for device in devices}


def _has_driver(device: Path) -> bool:
    return (device / "device" / "driver").exists()


def has_transport(library: Path) -> bool:
    """Return whether `library` comes with UCX's transport for RDMA devices."""
    return any((library.parent / "ucx").glob("libuct_ib*"))


def has_rdma(library: Path) -> bool:
    """Return whether this machine has an RDMA device that `library` serves.

    A wheel with a libibverbs of its own does not load the system's providers: it serves the devices whose provider is
    built into it.
    """
    drivers = device_drivers()
    if any(library.parent.glob("libibverbs-*")):
        drivers &= _IN_WHEELS
    return bool(drivers) and has_transport(library)


def version_of(path: Path) -> tuple[int, int]:
    """Return the version of a libucp that is not to be loaded into this process; (0, 0) where it cannot be loaded.

    Two versions in one process would share parts of each other.
    """
    program = "import ctypes, sys; v = [ctypes.c_uint() for _ in range(3)]; ctypes.CDLL(sys.argv[1]).ucp_get_version("
    program += "*map(ctypes.byref, v)); print(v[0].value, v[1].value)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=_VERSION_S, check=True
        )
        major, minor = map(int, done.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0, 0
    return major, minor


def candidates() -> list[tuple[str, Path]]:
    """(origin, path) of every libucp that may be loaded, the preferred first."""
    if forced := os.environ.get("PYUCX_LIBUCP"):
        return [("PYUCX_LIBUCP", Path(forced))]
    system, nixl, wheel = system_library(), nixl_library(), wheel_library()
    with_rdma = []
    if system and has_rdma(system):
        with_rdma.append(("system, with RDMA", system))
    if nixl and has_rdma(nixl):
        gathers = not with_rdma or version_of(with_rdma[0][1]) >= GATHERS
        with_rdma.insert(len(with_rdma) if gathers else 0, ("nixl wheel, with RDMA", nixl))
    fallbacks = ("libucx-cu12 wheel", wheel), ("nixl wheel", nixl), ("system", system)
    return with_rdma + [(origin, path) for origin, path in fallbacks if path]


def load() -> Library:
    """Load the preferred libucp. Raises `LibraryNotFound` with the list of libraries that were tried."""
    for name, value in _PROCESS_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    tried: list[str] = []
    for origin, path in candidates():
        try:
            library = _open(origin, path)
        except OSError as error:
            tried.append(f"{origin}: {path}: {error}")
            continue
        if library.version[:2] >= OLDEST:
            return library
        tried.append(f"{origin}: {path}: version {library.version} is older than {OLDEST}")
    hint = (
        "`pip install libucx-cu12` (or nixl-cu12), or install UCX (Debian: libucx0), or set PYUCX_LIBUCP to libucp.so.0"
    )
    raise LibraryNotFound("; ".join([*tried, hint]))


def _open(origin: str, path: Path) -> Library:
    beside = sorted(path.parent.glob("libucs[-.]*so*"), key=lambda file: (file.name != "libucs.so.0", file.name))
    ucs_name = str(beside[0]) if beside else ctypes.util.find_library("ucs") or "libucs.so.0"
    ucp, ucs = ffi.dlopen(str(path)), ffi.dlopen(ucs_name)
    parts = [ffi.new("unsigned *") for _ in range(3)]
    ucp.ucp_get_version(*parts)
    return Library(ucp, ucs, (parts[0][0], parts[1][0], parts[2][0]), path, origin)


library: Final = load()


def status_text(status: int) -> str:
    """UCX's words for a `ucs_status_t`."""
    text = ffi.string(library.ucs.ucs_status_string(status))
    return text.decode() if isinstance(text, bytes) else str(text)


def pointer_status(pointer: Any) -> int:
    """The meaning of a `ucs_status_ptr_t`: 0 done, below 0 an error status, 1 a request in progress."""
    if pointer == ffi.NULL:
        return 0
    value = int(ffi.cast("uintptr_t", pointer))
    error_floor = (1 << 64) + STATUS_LAST
    return value - (1 << 64) if value >= error_floor else 1
