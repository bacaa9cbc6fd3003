"""Runs tests over RDMA verbs without a card: `python -m tests.rdma.machine`, in a virtual machine with soft-RoCE.

The machine boots Debian's kernel, whose package has `rdma_rxe`, under QEMU without KVM. Its files are those of this
host, read-only, under a layer in memory: the same Python, packages and UCX. On a network interface that leads nowhere
it makes an RDMA device, and runs pytest with `UCX_TLS=rc,self`. No bytes can pass by TCP or shared memory then.

Needs `qemu-system-x86_64`, a static `busybox`, `dpkg-deb` and `apt-get` (for the kernel, unless `--kernel` has a folder
with one), `rdma` (iproute2), the verbs providers (`ibverbs-providers`), and a libucp that has transports for them:
Debian 13's, or one built as the Dockerfile does. The libucp in the `nixl` wheels serves mlx5 devices alone.
"""

from __future__ import annotations

import argparse
import gzip
import lzma
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from pyucx import _library
from tests.rdma import ROOT

_MODULES: Final = (
    "virtio_pci",
    "9p",
    "9pnet_virtio",
    "overlay",
    "dummy",
    "crc32_generic",
    "rdma_rxe",
    "ib_uverbs",
    "rdma_ucm",
)
_END: Final = "tests ended with"
_LIMIT_S: Final = 1500
_SETTINGS: Final = {
    "UCX_TLS": "rc,self",
    "UCX_NET_DEVICES": "all",
    # The kernel's soft-RoCE reports no error when a peer has died: UCX has to ask.
    "UCX_KEEPALIVE_INTERVAL": "1s",
    "UCX_UD_VERBS_TIMEOUT": "3s",
    "PYTHONDONTWRITEBYTECODE": "1",
    "QUIRE_TEST_RDMA": "1",
    "HOME": "/root",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}
_INIT: Final = """#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc none /proc; $b mount -t sysfs none /sys; $b mount -t devtmpfs none /dev
for module in /modules/*; do $b insmod $module || echo "$module does not load"; done
$b mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,cache=loose,ro host /lower
$b mount -t tmpfs -o size=12g none /memory; $b mkdir -p /memory/upper /memory/work
$b mount -t overlay -o lowerdir=/lower,upperdir=/memory/upper,workdir=/memory/work none /root
for part in proc sys dev; do $b mount --move /$part /root/$part; done
$b ln -s /proc/self/fd /root/dev/fd; $b mkdir -p /root/dev/shm; $b mount -t tmpfs none /root/dev/shm
$b cp /tests.sh /root/tests.sh
exec $b chroot /root /bin/bash /tests.sh
"""
_TESTS: Final = """ulimit -l unlimited
ip link set lo up
ip link add roce type dummy && ip address add 10.77.0.1/24 dev roce && ip link set roce mtu 4096 up
rdma link add rxe0 type rxe netdev roce
until [ -e /dev/infiniband/uverbs0 ]; do busybox sleep 0.1; done
chmod a+rw /dev/infiniband/*
cd {root}
{environment} {command}
echo "{end} $?"
echo o > /proc/sysrq-trigger
busybox sleep 60
"""


class Unfit(Exception):
    """This host lacks a part of the machine; the text names it."""


def kernel_of(folder: Path | None, work: Path) -> tuple[Path, Path]:
    """Return a kernel and the folder of its modules: of `folder`, else of Debian's package, which is downloaded."""
    if folder is None:
        folder = work / "kernel"
        if not folder.exists():
            _download(work, folder)
    for modules in sorted(folder.glob("lib/modules/*")) or sorted(folder.glob("usr/lib/modules/*")):
        kernel = folder / "boot" / f"vmlinuz-{modules.name}"
        if kernel.exists() and any(modules.rglob("rdma_rxe.ko*")):
            return kernel, modules
    raise Unfit(f"{folder} has no kernel with rdma_rxe")


def _download(work: Path, folder: Path) -> None:
    try:
        named = subprocess.run(
            ["apt-cache", "depends", "linux-image-amd64"], capture_output=True, text=True, check=True
        ).stdout
        package = next(line.split()[1] for line in named.splitlines() if "Depends:" in line)
        subprocess.run(["apt-get", "download", "-q", package], cwd=work, check=True)
        archive = next(work.glob(f"{package}_*.deb"))
        subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
        archive.unlink()
    except (OSError, StopIteration, subprocess.CalledProcessError) as error:
        raise Unfit(f"Debian's kernel could not be downloaded: {error}; give --kernel") from None


def modules_in_order(folder: Path) -> list[tuple[str, bytes]]:
    """Return names and contents of the modules, each after those that it depends on."""
    files = {file.name.split(".")[0].replace("-", "_"): file for file in folder.rglob("*.ko*")}
    contents: dict[str, bytes] = {}

    def add(name: str) -> None:
        if name in contents or name not in files:
            return  # what is built in has no file
        content = _unpacked(files[name])
        for dependency in _depends(content):
            add(dependency)
        contents[name] = content

    for name in _MODULES:
        add(name)
    return list(contents.items())


def _unpacked(file: Path) -> bytes:
    content = file.read_bytes()
    return {".xz": lzma.decompress, ".gz": gzip.decompress}.get(file.suffix, bytes)(content)


def _depends(module: bytes) -> Iterator[str]:
    at = module.find(b"\0depends=")
    if at >= 0:
        names = module[at + len(b"\0depends=") :].split(b"\0", 1)[0].decode()
        yield from (name.replace("-", "_") for name in names.split(",") if name)


def archive_of(entries: Sequence[tuple[str, int, bytes]]) -> bytes:
    """Return a cpio archive ("newc") of (path, mode, content), as kernels unpack at their start."""
    parts = list[bytes]()
    for number, (path, mode, content) in enumerate([*entries, ("TRAILER!!!", 0, b"")], 1):
        name = path.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name), 0)
        header = b"070701" + b"".join(b"%08X" % field for field in fields)
        parts += map(_padded, (header + name, content))
    return b"".join(parts)


def _padded(part: bytes) -> bytes:
    return part + bytes(-len(part) % 4)


def initial_files(busybox: Path, modules: Path, script: str) -> bytes:
    """Return what the machine begins with: busybox, modules, and the scripts."""
    folder, program = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o755
    folders = ("bin", "dev", "lower", "memory", "modules", "proc", "root", "sys")
    entries = [(name, folder, b"") for name in folders]
    entries += [("bin/busybox", program, busybox.read_bytes()), ("init", program, _INIT.encode())]
    entries.append(("tests.sh", program, script.encode()))
    for number, (name, content) in enumerate(modules_in_order(modules)):
        entries.append((f"modules/{number:02}-{name}.ko", program, content))
    return gzip.compress(archive_of(entries), compresslevel=1)


def script_of(tests: Sequence[str], library: Path) -> str:
    """Return what the machine runs: pytest with these arguments."""
    settings = {**_SETTINGS, "PYUCX_LIBUCP": str(library), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
    command = shlex.join([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color", "no", "-m", "", *tests])
    return _TESTS.format(root=shlex.quote(str(ROOT)), environment=f"env {environment}", command=command, end=_END)


def library_with_verbs() -> Path:
    """Return the libucp for the machine. Raises `Unfit`."""
    forced = os.environ.get("PYUCX_LIBUCP")
    library = Path(forced) if forced else _library.system_library()
    if library is None or not _library.has_transport(library):
        raise Unfit(
            "no libucp with transports for RDMA devices; build one as the Dockerfile does, or name it: PYUCX_LIBUCP"
        )
    if _library.version_of(library) < _library.GATHERS:
        raise Unfit(f"{library} is older than UCX 1.15; name another one: PYUCX_LIBUCP")
    return library


def program(name: str, package: str) -> str:
    """Return the path of a program. Raises `Unfit`."""
    path = shutil.which(name)
    if path is None:
        raise Unfit(f"no {name}: apt-get install {package}")
    return path


def boot(qemu: str, kernel: Path, initial: Path, memory_mb: int) -> int:
    """Run the machine, print what its console shows, and return what the tests ended with."""
    command = [qemu, "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", str(memory_mb)]
    command += ["-kernel", str(kernel), "-initrd", str(initial), "-append", "console=ttyS0 quiet panic=-1"]
    command += ["-nographic", "-no-reboot", "-monitor", "none", "-nic", "none"]
    command += ["-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"]
    command += ["-device", "virtio-9p-pci,fsdev=host,mount_tag=host"]
    ended = 1
    with subprocess.Popen(
        ["timeout", str(_LIMIT_S), *command], stdout=subprocess.PIPE, text=True, errors="replace"
    ) as machine:
        assert machine.stdout is not None
        for line in machine.stdout:
            if line.startswith(_END):
                ended = int(line.split()[-1])
            print(line, end="", flush=True)
    return ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog="What else is given goes to pytest.")
    parser.add_argument("--kernel", type=Path, help="folder with boot/vmlinuz-* and lib/modules/*, as / has")
    parser.add_argument("--memory-mb", type=int, default=6144)
    arguments, tests = parser.parse_known_args()
    work = ROOT / "build" / "rdma"
    work.mkdir(parents=True, exist_ok=True)
    try:
        qemu, busybox = program("qemu-system-x86_64", "qemu-system-x86"), program("busybox", "busybox-static")
        program("rdma", "iproute2")
        script = script_of(tests, library_with_verbs())
        kernel, modules = kernel_of(arguments.kernel, work)
    except Unfit as error:
        print(f"skipped: {error}")
        return 0
    with tempfile.NamedTemporaryFile(suffix=".cpio.gz") as initial:
        initial.write(initial_files(Path(busybox), modules, script))
        initial.flush()
        return boot(qemu, kernel, Path(initial.name), arguments.memory_mb)


if __name__ == "__main__":
    sys.exit(main())
