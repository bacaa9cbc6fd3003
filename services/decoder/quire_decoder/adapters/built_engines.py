"""Engines that are built once for each shape and kept in a folder. While one is missing the VAE is decoded eagerly.

A separate process exports the VAE and compiles it (`adapters.engine_build`), which takes minutes. An engine rounds
differently from the eager decode, so the build of a decoder changes when the first batch has used it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Protocol

from quire.model.errors import ConfigInvalid
from quire.telemetry import logger
from quire_decoder.adapters.engine_build import load_engine
from quire_decoder.adapters.engines import Decode, Shape, eager, is_out_of_memory
from quire_decoder.adapters.weights import Weights

USES_MIN: Final = 8
"""A shape is built for once so many of its batches were decoded: one that is asked for once is not worth minutes."""
_ENGINES_MAX: Final = 8
"""Engines of a process: each has a copy of the weights."""
_FILES_MAX: Final = 32
"""Files that a folder keeps; the ones that were not loaded for the longest time leave."""
_COUNTED_MAX: Final = 1024
"""Shapes whose batches are counted; then counting begins anew: clients choose shapes."""
_BUILD_S_MAX: Final = 86_400.0
_SUFFIX: Final = ".pt2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Identity of an engine: everything that its code depends on.

    Attributes:
        compiler: "compile" (inductor) or "tensorrt", with its version.
        torch: Version.
        diffusers: Version; it defines the VAE.
        device: Model of the device.
        weights_sha256: Of the VAE.
        config_sha256: Of its configuration.
        dtype: Of its weights, as torch names it.
        shape: Of the batch of latents.
    """

    compiler: str
    torch: str
    diffusers: str
    device: str
    weights_sha256: str
    config_sha256: str
    dtype: str
    shape: Shape

    @property
    def digest(self) -> str:
        """Name of the file."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


class Build(Protocol):
    """A build that runs."""

    def ended(self) -> str | None:
        """Return None while it runs, "" once the engine is there, else why it is not. Does not block."""

    def kill(self) -> None:
        """End it."""


class Builder(Protocol):
    """Begins builds."""

    def __call__(self, weights: Weights, target: Target, device: str, path: Path) -> Build:
        """Build an engine into `path`, which is there once it is complete."""


class EngineFiles:
    """Compiled engines in a folder, for all devices of this process. Builds are serialized. Thread-safe.

    Args:
        folder: Where they are. Files in it are run as code, so nobody else may be able to write there.
        builder: Starts a build.

    Raises:
        ConfigInvalid: The folder cannot be made, or others can write there.
    """

    def __init__(self, folder: Path, builder: Builder) -> None:
        self._folder = folder
        self._builder = builder
        self._lock = threading.Lock()
        self._ready: Mapping[Target, str] = {}
        self._failed: set[Target] = set()
        self._uses: Counter[Target] = Counter()
        self._running: tuple[Target, Build] | None = None
        self._is_closed = False
        _check_private(folder)

    @property
    def ready(self) -> Mapping[Target, str]:
        """Engines that are there, of shapes that were asked for, with digests of their files."""
        with self._lock:
            return self._ready

    @property
    def is_building(self) -> bool:
        """Whether an engine is being built."""
        with self._lock:
            self._poll()
            return self._running is not None

    def path(self, target: Target) -> Path:
        """Return the file of an engine."""
        return self._folder / (target.digest + _SUFFIX)

    def used(self, weights: Weights, target: Target, device: str) -> None:
        """Count a batch, see whether its engine is there, and have it built if it is worth it."""
        with self._lock:
            if target in self._ready or target in self._failed or len(self._ready) >= _ENGINES_MAX or self._is_closed:
                return
            if len(self._uses) >= _COUNTED_MAX and target not in self._uses:
                self._uses.clear()
            self._uses[target] += 1
            is_worth_it = self._uses[target] >= USES_MIN and self._running is None
            if self._uses[target] == 1 or is_worth_it:  # another process may have built it
                self._found(target)
            if is_worth_it and target not in self._ready:
                self._build(weights, target, device)

    def poll(self) -> None:
        """See whether a build has ended."""
        with self._lock:
            self._poll()

    def unusable(self, target: Target, reason: str) -> None:
        """Remove an engine that cannot be loaded or run; it is built again by the next process."""
        with self._lock:
            self._ready = {ready: digest for ready, digest in self._ready.items() if ready != target}
            self._failed.add(target)
            self.path(target).unlink(missing_ok=True)
        logger().error("an engine cannot be used", shape=target.shape, error=reason)

    def close(self) -> None:
        """End the build that runs, and begin none."""
        with self._lock:
            self._is_closed = True
            if self._running is not None:
                self._running[1].kill()
                self._running = None

    def _poll(self) -> None:
        if self._running is None:
            return
        target, build = self._running
        reason = build.ended()
        if reason is None:
            return
        self._running = None
        if not reason:
            self._found(target)
        if target in self._ready:
            logger().info("an engine is built", shape=target.shape, compiler=target.compiler)
        else:
            self._failed.add(target)
            logger().error("an engine could not be built", shape=target.shape, error=reason or "there is no file")

    def _found(self, target: Target) -> None:
        """Note an engine, if its file is there."""
        try:
            with self.path(target).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            return
        self._ready = {**self._ready, target: digest}

    def _build(self, weights: Weights, target: Target, device: str) -> None:
        try:
            self._make_room()
            self._running = target, self._builder(weights, target, device, self.path(target))
        except OSError as error:
            self._failed.add(target)
            logger().error("an engine could not be built", shape=target.shape, error=str(error))
            return
        logger().info("an engine is being built", shape=target.shape, compiler=target.compiler)

    def _make_room(self) -> None:
        in_use = {self.path(target) for target in self._ready}
        files = [path for path in self._folder.glob(f"*{_SUFFIX}") if path not in in_use]
        for path in sorted(files, key=_changed_s)[: max(0, len(files) + len(in_use) + 1 - _FILES_MAX)]:
            path.unlink(missing_ok=True)
        for folder in self._folder.glob("building-*"):  # of builds that were killed
            if time.time() - _changed_s(folder) > _BUILD_S_MAX:
                shutil.rmtree(folder, ignore_errors=True)


class BuiltEngines:
    """The `DecodeEngine` port: engines of files, for one device.

    Args:
        files: Of all devices.
        compiler: With its version.
        device: As torch names it.
        model: Of the device: engines of one do not run on another.
    """

    def __init__(self, files: EngineFiles, compiler: str, device: str, model: str) -> None:
        self.files = files
        self._compiler = compiler
        self._device, self._model = device, model
        self._ready = files.ready
        self._engines: dict[Target, Decode] = {}

    @classmethod
    def of(cls, name: str, device: str, folder: Path | None) -> BuiltEngines:
        """Return those of the user's folder, or of another one.

        Raises:
            ConfigInvalid: The compiler is not installed, or the folder is not private.
        """
        if name == "tensorrt" and importlib.util.find_spec("torch_tensorrt") is None:
            raise ConfigInvalid("QUIRE_DECODER_ENGINE=tensorrt needs the package torch_tensorrt")
        if name == "tensorrt" and not device.startswith("cuda"):
            raise ConfigInvalid(f"QUIRE_DECODER_ENGINE=tensorrt needs CUDA, the device is {device}")
        compiler = f"tensorrt {version('torch_tensorrt')}" if name == "tensorrt" else f"compile {version('torch')}"
        return cls(_files(folder or _user_folder()), compiler, device, _model_of(device))

    @property
    def name(self) -> str:
        return _name(self._compiler, self.files.ready)

    @property
    def used(self) -> str:
        return _name(self._compiler, self._ready)

    def begin(self) -> None:
        self.files.poll()
        self._ready = self.files.ready

    def forget(self, weights_sha256: str, dtype: str) -> None:
        """Unload the engines of a VAE: they have copies of its weights."""
        for target in [
            target for target in self._engines if (target.weights_sha256, target.dtype) == (weights_sha256, dtype)
        ]:
            del self._engines[target]

    def close(self) -> None:
        self.files.close()

    def prepare(self, vae: Any, weights: Weights, dtype: str) -> Decode:
        plain = eager(vae)
        config = hashlib.sha256((weights.folder / "config.json").read_bytes()).hexdigest()

        def decode(latents: Any) -> Any:
            target = Target(
                compiler=self._compiler,
                torch=version("torch"),
                diffusers=version("diffusers"),
                device=self._model,
                weights_sha256=weights.sha256,
                config_sha256=config,
                dtype=dtype,
                shape=tuple(latents.shape),
            )
            self.files.used(weights, target, self._device)
            self._ready = self.files.ready
            if target in self._ready:
                try:
                    return self._engine(target)(latents)
                except Exception as error:  # of any kind: the file may be torn, or of another build of a library
                    if is_out_of_memory(error):
                        raise
                    self._engines.pop(target, None)
                    self.files.unusable(target, str(error).partition("\n")[0])
                    self._ready = self.files.ready
            return plain(latents)

        return decode

    def _engine(self, target: Target) -> Decode:
        engine = self._engines.get(target)
        if engine is None:
            path = self.files.path(target)
            engine = self._engines[target] = load_engine(path, target.compiler.split()[0], self._device)
            os.utime(path)
        return engine


class _Process:
    """A build in a process. Its messages go to a log file in the same folder, which stays if it fails."""

    def __init__(self, command: Sequence[str], path: Path) -> None:
        self._log = path.with_suffix(f".{os.urandom(4).hex()}.log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, str(path)], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def ended(self) -> str | None:
        status = self._process.poll()
        if status is None:
            return None
        if not status:
            self._log.unlink(missing_ok=True)
            return ""
        try:
            lines = self._log.read_bytes()[-4096:].decode(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return f"status {status}, {self._log}: {lines[-1] if lines else 'it has written nothing'}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.unlink(missing_ok=True)


def build_in_process(weights: Weights, target: Target, device: str, path: Path) -> Build:
    """The `Builder` of `adapters.engine_build`."""
    arguments = {
        "folder": str(weights.folder),
        "variant": weights.variant,
        "sha256": weights.sha256,
        "dtype": target.dtype,
        "shape": target.shape,
        "compiler": target.compiler.split()[0],
        "device": device,
    }
    module = "quire_decoder.adapters.engine_build"
    return _Process([sys.executable, "-m", module, json.dumps(arguments)], path)


_FILES: dict[Path, EngineFiles] = {}


def _files(folder: Path) -> EngineFiles:
    """Return the engines of a folder: one object for all devices of the process."""
    if folder not in _FILES:
        _FILES[folder] = EngineFiles(folder, build_in_process)
    return _FILES[folder]


def _name(compiler: str, ready: Mapping[Target, str]) -> str:
    """Name a build by the bytes of its engines: compilers choose code by timing."""
    if not ready:
        return "eager"
    return f"{compiler} of {hashlib.sha256(''.join(sorted(ready.values())).encode()).hexdigest()[:16]}, else eager"


def _model_of(device: str) -> str:
    import torch

    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _user_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "decoder-engines"


def _check_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise ConfigInvalid(f"QUIRE_DECODER_ENGINES_FOLDER={str(folder)!r}: {error.strerror}") from None
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigInvalid(
            f"QUIRE_DECODER_ENGINES_FOLDER={str(folder)!r} can be written by others, and engines are run as code; "
            "name a folder of this user alone (chmod 700)"
        )


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
