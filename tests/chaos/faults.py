"""What is done to a cluster, and how it is undone."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from redis import Redis

from tests.chaos.proxy import Proxy
from tests.chaos.world import World

_FAKETIME: Final = next(
    iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), Path("/usr/lib/faketime/libfaketimeMT.so.1")
)
_BACKUP_S: Final = 600.0
_FAILOVER_S: Final = 2.5
"""More than a replica needs to be elected."""
_SETTLED_S: Final = 1.5
"""For how long a node is left alone between its restart and the fault that follows, or the other way round."""
_FAILING_DRIVE: Final = Path(__file__).with_name("failing_drive.c")


@dataclass(frozen=True)
class Fault:
    """`inject` does it to `target`, `heal` undoes it."""

    kind: str
    target: str
    inject: Callable[[], None]
    heal: Callable[[], None]


class Faults:
    """Faults that this machine can do, drawn by the seed. With `lossy` Redis may be emptied, or restored from a backup
    of up to ten minutes ago.
    """

    def __init__(self, world: World, seed: int, *, lossy: bool) -> None:
        self._world = world
        self._random = random.Random(seed)
        self._services = [name for name in world.names if name != "redis"]
        self._makers = [self._killed, self._killed, self._paused]
        if world.shards is not None:
            self._shards = world.shards
            self._makers += [self._shard_killed, self._shard_killed, self._shard_paused]
        else:
            self._makers += [self._redis_killed, self._redis_paused]
        if world.networks:
            self._makers += [self._cut, self._cut, self._slowed, self._disk_full]
        if _FAKETIME.exists():
            self._makers += [self._clock_skewed]
        self._makers += [self._answers_dropped, self._answers_dropped]
        self._failing_drive = world.folder / "failing_drive.so"
        if shutil.which("cc"):
            command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(self._failing_drive), str(_FAILING_DRIVE), "-ldl"]
            subprocess.run(command, check=True)
            self._makers += [self._drive_failing, self._drive_failing]
        self._backups: list[tuple[float, dict[bytes, bytes]]] | None = None
        if lossy and world.shards is None:
            self._makers += [self._redis_emptied, self._redis_restored]
            self._backups = []

    def draw(self) -> Fault:
        if self._backups is not None:
            self._backups.append((time.monotonic(), self._backup()))
        return self._random.choice(self._makers)()

    def hold_s(self) -> float:
        return self._random.uniform(0.5, 4.0)

    def _service(self) -> str:
        return self._random.choice(self._services)

    def _killed(self) -> Fault:
        name = self._service()
        return Fault("kill -9", name, lambda: self._world.kill(name), lambda: self._world.restart(name))

    def _paused(self) -> Fault:
        name = self._service()
        return Fault("pause", name, *self._signals(name))

    def _redis_paused(self) -> Fault:
        return Fault("pause", "redis", *self._signals("redis"))

    def _signals(self, name: str) -> tuple[Callable[[], None], Callable[[], None]]:
        world = self._world
        return lambda: world.kill(name, signal.SIGSTOP), lambda: world.kill(name, signal.SIGCONT)

    def _redis_killed(self) -> Fault:
        """By SIGTERM: killed hard it may forget the last second of names (`appendfsync everysec`)."""

        def stop() -> None:
            pid = self._world.pid("redis")
            self._world.kill("redis", signal.SIGTERM)
            _until_gone(pid)

        return Fault("restart", "redis", stop, lambda: self._world.restart("redis"))

    def _shard_killed(self) -> Fault:
        """With -9, and long enough for its replica to take its slots; it comes back as a replica."""
        port = self._random.choice(self._shards.ports)

        def kill() -> None:
            self._shards.kill(port)
            time.sleep(_FAILOVER_S)

        return Fault("kill -9", f"redis {port}", kill, lambda: self._shards.start(port))

    def _shard_paused(self) -> Fault:
        port = self._random.choice(self._shards.ports)
        process = self._shards.servers[port]
        return Fault(
            "pause",
            f"redis {port}",
            lambda: process.send_signal(signal.SIGSTOP),
            lambda: process.send_signal(signal.SIGCONT),
        )

    def _redis_emptied(self) -> Fault:
        def empty() -> None:
            with contextlib.closing(Redis.from_url(self._world.redis_url)) as client:
                client.flushall()

        return Fault("empty", "redis", empty, lambda: None)

    def _backup(self) -> dict[bytes, bytes]:
        """Dump the keys of Redis."""
        with contextlib.closing(Redis.from_url(self._world.redis_url)) as client:
            names = [bytes(name) for name in client.scan_iter(count=10_000)]
            dumped = client.pipeline(transaction=True)
            for name in names:
                dumped.dump(name)
            return {name: value for name, value in zip(names, dumped.execute(), strict=True) if value is not None}

    def _redis_restored(self) -> Fault:
        assert self._backups is not None, "it may lose something"
        age_s, backup = next(
            (time.monotonic() - since_s, dump)
            for since_s, dump in self._backups
            if time.monotonic() - since_s < _BACKUP_S
        )

        def restore() -> None:
            with contextlib.closing(Redis.from_url(self._world.redis_url)) as client:
                back = client.pipeline(transaction=True)
                back.flushall()
                for name, value in backup.items():
                    back.restore(name, 0, value)
                back.execute()

        return Fault(f"{age_s:.0f} s back", "redis", restore, lambda: None)

    def _answers_dropped(self) -> Fault:
        """Drop the answers between orchestrators and a storage node. The requests are executed."""
        name = self._storage()
        orchestrators = [self._world.address(each) for each in self._world.names if each.startswith("orchestrator")]
        targets = [*orchestrators, self._world.address(name)]
        proxy = Proxy(self._world.own_host, targets)

        def inject() -> None:
            *ways, way_here = proxy.addresses
            self._restart(name, {"QUIRE_ORCHESTRATOR_ADDRESS": ",".join(ways), "QUIRE_STORAGE_ADVERTISE": way_here})
            time.sleep(_SETTLED_S)
            proxy.drop_answers()

        def heal() -> None:
            proxy.pass_answers()
            time.sleep(_SETTLED_S)
            self._restart(name, {})
            proxy.close()

        return Fault("no answers", name, inject, heal)

    def _drive_failing(self) -> Fault:
        """Every second read and write of a storage node's drive fails with EIO."""
        name, trigger = self._storage(), self._world.folder / "drive_fails"
        preload = {
            "LD_PRELOAD": str(self._failing_drive),
            "CHAOS_DRIVE": str(self._world.folder / name),
            "CHAOS_DRIVE_FAILS": str(trigger),
            "QUIRE_STORAGE_IO": "threads",
        }

        def inject() -> None:
            self._restart(name, preload)
            time.sleep(_SETTLED_S)
            trigger.touch()

        def heal() -> None:
            trigger.unlink()
            time.sleep(_SETTLED_S)
            self._restart(name, {})

        return Fault("EIO", name, inject, heal)

    def _storage(self) -> str:
        return self._random.choice([name for name in self._services if name.startswith("storage")])

    def _restart(self, name: str, environment: dict[str, str]) -> None:
        self._world.kill(name)
        self._world.restart(name, environment=environment)

    def _cut(self) -> Fault:
        name = self._service()
        return Fault("cut", name, lambda: self._world.cut(name), lambda: self._world.mend(name))

    def _slowed(self) -> Fault:
        name = self._service()
        return Fault("slow", name, lambda: self._world.slow(name, 8), lambda: self._world.mend(name))

    def _disk_full(self) -> Fault:
        """Of the object tier."""
        filler = self._world.folder / "objects" / "filler"

        def fill() -> None:
            with contextlib.suppress(OSError), filler.open("wb") as out:
                while True:
                    out.write(bytes(1 << 20))

        return Fault("fill", "object tier", fill, lambda: filler.unlink(missing_ok=True))

    def _clock_skewed(self) -> Fault:
        """A service that comes up with a clock that is 20 s off, one way or the other."""
        name, offset = self._service(), self._random.choice(("+20", "-20"))
        skew = {"LD_PRELOAD": str(_FAKETIME), "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}

        return Fault(f"clock {offset} s", name, lambda: self._restart(name, skew), lambda: self._restart(name, {}))


@contextlib.contextmanager
def small_object_tier(folder: Path, *, size_mib: int) -> Iterator[None]:
    """A file system of its own for the object tier, so that it can be full."""
    objects = folder / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(objects)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(objects)], check=False)
        shutil.rmtree(objects, ignore_errors=True)


def _until_gone(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
