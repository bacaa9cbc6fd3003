"""Finds and loads libucp, once per process, after configuring UCX to leave the process alone.

Order: `PYUCX_LIBUCP` (a path), the system's libucp when the machine has an RDMA device and the library its transport,
the `libucx-cu12` wheel, the system's libucp.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
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


def has_rdma(library: Path) -> bool:
    """Return whether this machine has an RDMA device and `library` comes with UCX's transport for it."""
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir()) and any((library.parent / "ucx").glob("libuct_ib*"))


def candidates() -> list[tuple[str, Path]]:
    """(origin, path) of every libucp that may be loaded, the preferred first."""
    if forced := os.environ.get("PYUCX_LIBUCP"):
        return [("PYUCX_LIBUCP", Path(forced))]
    system, wheel = system_library(), wheel_library()
    paths = []
    if system and has_rdma(system):
        paths.append(("system, with RDMA", system))
    if wheel:
        paths.append(("libucx-cu12 wheel", wheel))
    if system:
        paths.append(("system", system))
    return paths


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
    hint = "install UCX (Debian: libucx0), or `pip install libucx-cu12`, or set PYUCX_LIBUCP to libucp.so.0"
    raise LibraryNotFound("; ".join([*tried, hint]))


def _open(origin: str, path: Path) -> Library:
    folder = path.parent
    ucs_path = folder / "libucs.so.0"
    ucs_name = str(ucs_path) if ucs_path.exists() else ctypes.util.find_library("ucs") or "libucs.so.0"
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
