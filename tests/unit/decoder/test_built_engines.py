"""Engines that are built once and kept in a folder: eager until one is there, and never a torn or foreign one."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.model.errors import ConfigInvalid
from quire_decoder.adapters import built_engines
from quire_decoder.adapters.built_engines import BuiltEngines, EngineFiles, Target, build_in_process
from quire_decoder.adapters.vae import DiffusersVaes, VaeSettings
from quire_decoder.adapters.weights import Weights
from quire_decoder.errors import DeviceFull
from tests.unit.decoder.small_vae import SCALE, random_latents, small_vae

USES = built_engines.USES_MIN


@dataclass
class Build:
    """A build that ends when a test sets `reason`."""

    path: Path
    target: Target
    reason: str | None = None
    killed: bool = False
    content: bytes = b"engine"

    def complete(self) -> None:
        self.path.write_bytes(self.content)
        self.reason = ""

    def ended(self) -> str | None:
        return self.reason

    def kill(self) -> None:
        self.killed = True


@dataclass
class Builder:
    builds: list[Build] = field(default_factory=list)

    def __call__(self, weights: Weights, target: Target, device: str, path: Path) -> Build:
        self.builds.append(Build(path, target))
        return self.builds[-1]


@dataclass
class Scene:
    folder: Path
    builder: Builder
    loaded: list[Path]

    def vaes(self, files: EngineFiles | None = None) -> tuple[DiffusersVaes, EngineFiles]:
        files = files or EngineFiles(self.folder, self.builder)
        engine = BuiltEngines(files, "compile 1", "cpu", "a processor")
        return DiffusersVaes(small_vae(), engine, VaeSettings()), files


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """Engines that make black pictures."""
    loaded: list[Path] = []

    def broken(latents: Any) -> Any:
        raise RuntimeError("of another build of the library")

    def load(path: Path, compiler: str, device: str) -> Any:
        content = path.read_bytes()
        if content == b"broken":
            return broken
        if not content.startswith(b"engine"):
            raise RuntimeError("it is no engine\nat all")
        loaded.append(path)
        import torch

        return lambda latents: torch.full((len(latents), 3, SCALE * latents.shape[2], SCALE * latents.shape[3]), -1.0)

    monkeypatch.setattr(built_engines, "load_engine", load)
    yield Scene(tmp_path / "engines", Builder(), loaded)


def _is_black(vaes: DiffusersVaes, side: int = 64) -> bool:
    decoded = vaes.decode(*random_latents(1, side))
    assert decoded.build == vaes.build
    return not decoded.pixels[0].any()


def test_a_shape_that_is_used_often_is_built_in_the_background(scene: Scene) -> None:
    vaes, _ = scene.vaes()
    eager_build = vaes.build
    assert not any(_is_black(vaes) for _ in range(2 * USES))
    (build,) = scene.builder.builds
    assert vaes.build == eager_build and "eager" in eager_build
    build.complete()
    assert _is_black(vaes), "from the next batch on"
    engine_build = vaes.build
    assert engine_build != eager_build
    assert not _is_black(vaes, 128), "another shape is decoded eagerly"
    assert vaes.build == engine_build
    restarted, _ = scene.vaes()
    assert _is_black(restarted) and restarted.build == engine_build, "another process finds it"
    assert len(scene.builder.builds) == 1 and len(scene.loaded) == 2


def test_one_is_built_at_a_time_and_a_failed_one_is_not_tried_again(scene: Scene) -> None:
    vaes, _ = scene.vaes()
    for _ in range(USES):
        _is_black(vaes)
        _is_black(vaes, 128)
    (first,) = scene.builder.builds
    first.reason = "status 1: no compiler"
    for _ in range(2 * USES):
        assert not _is_black(vaes) and not _is_black(vaes, 128)
    assert [build.target.shape[-1] for build in scene.builder.builds] == [32, 64]
    vaes.close()
    assert scene.builder.builds[1].killed and not scene.builder.builds[0].killed


@pytest.mark.parametrize("content", [b"torn", b"broken"])
def test_a_useless_engine_costs_nothing_but_itself(scene: Scene, content: bytes) -> None:
    """An engine cannot be loaded, or fails when it runs."""
    vaes, _ = scene.vaes()
    for _ in range(USES):
        _is_black(vaes)
    eager_build = vaes.build
    scene.builder.builds[0].content = content
    scene.builder.builds[0].complete()
    for _ in range(3):
        assert not _is_black(vaes) and vaes.build == eager_build
    assert not list(scene.folder.glob("*.pt2"))


def test_an_engine_that_finds_no_memory_is_kept(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    vaes, _ = scene.vaes()
    for _ in range(USES):
        _is_black(vaes)
    scene.builder.builds[0].complete()

    def fails(path: Path, compiler: str, device: str) -> Any:
        raise RuntimeError("cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(built_engines, "load_engine", fails)
        with pytest.raises(DeviceFull):
            vaes.decode(*random_latents(1, 64))
    assert _is_black(vaes)


def test_builds_are_named_by_the_bytes_of_engines(scene: Scene) -> None:
    """Compilers choose code by timing: the same target may be built in two ways, with other roundings."""
    builds = []
    for content in (b"engine", b"engine, in another way", b"engine"):
        vaes, _ = scene.vaes()
        for _ in range(USES):
            _is_black(vaes)
        scene.builder.builds[-1].content = content
        scene.builder.builds[-1].complete()
        assert _is_black(vaes)
        builds.append(vaes.build)
        scene.builder.builds[-1].path.unlink()
    assert builds[0] == builds[2] != builds[1]


def test_what_another_process_has_built_is_found(scene: Scene) -> None:
    vaes, _ = scene.vaes()
    for _ in range(USES - 1):
        assert not _is_black(vaes)
    path = scene.folder / f"{'0' * 64}.pt2"
    process, files = scene.vaes()
    for _ in range(USES):
        _is_black(process)
    scene.builder.builds[0].complete()
    assert _is_black(vaes) and len(scene.builder.builds) == 1 and not path.exists()
    process.close()
    for _ in range(USES):
        _is_black(process, 128)
    assert len(scene.builder.builds) == 1 and files.path(scene.builder.builds[0].target).exists(), "it was closed"


def test_a_builder_that_cannot_begin_costs_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(weights: Weights, target: Target, device: str, path: Path) -> Build:
        raise OSError("no space left on the device")

    vaes, _ = scene.vaes(EngineFiles(scene.folder, fails))
    assert not any(_is_black(vaes) for _ in range(2 * USES))


def test_devices_of_a_process_share_engines_and_builds(scene: Scene) -> None:
    first, files = scene.vaes()
    second, _ = scene.vaes(files)
    for _ in range(USES):
        _is_black(first)
    scene.builder.builds[0].complete()
    assert _is_black(second) and _is_black(first) and first.build == second.build
    assert len(scene.builder.builds) == 1


def test_what_is_made_while_an_engine_comes_is_of_its_build(scene: Scene) -> None:
    """Two devices decode in threads while an engine comes: black pictures are of the later build alone."""
    first, files = scene.vaes()
    runners = [first, scene.vaes(files)[0]]
    for _ in range(USES):
        _is_black(first)
    results: list[tuple[str, bool]] = []
    barrier = threading.Barrier(3)

    def decode(vaes: DiffusersVaes) -> None:
        barrier.wait(30)
        for _ in range(20):
            decoded = vaes.decode(*random_latents(1, 64))
            results.append((decoded.build, not decoded.pixels[0].any()))

    threads = [threading.Thread(target=decode, args=(vaes,)) for vaes in runners]
    for thread in threads:
        thread.start()
    barrier.wait(30)
    scene.builder.builds[0].complete()
    for thread in threads:
        thread.join(60)
    assert len({build for build, is_black in results if is_black}) == 1
    assert {is_black for build, is_black in results if build == first.build} == {True}
    assert len(results) == 40


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    """Engines are run as code."""
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    with pytest.raises(ConfigInvalid, match="chmod 700"):
        EngineFiles(folder, Builder())
    with pytest.raises(ConfigInvalid, match="QUIRE_DECODER_ENGINES_FOLDER"):
        EngineFiles(Path("/proc/no/folder"), Builder())


def test_a_folder_keeps_a_bounded_number_of_engines(scene: Scene) -> None:
    vaes, _ = scene.vaes()
    for number in range(built_engines._FILES_MAX + 5):
        path = scene.folder / f"{number:03}.pt2"
        path.write_bytes(b"engine")
        os.utime(path, (number, number))
    for _ in range(USES):
        _is_black(vaes)
    scene.builder.builds[0].complete()
    names = sorted(path.name for path in scene.folder.glob("0*.pt2"))
    assert len(list(scene.folder.glob("*.pt2"))) == built_engines._FILES_MAX
    assert names[0] == "006.pt2", "the oldest have left"


def test_shapes_that_clients_choose_take_no_memory(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built_engines, "_COUNTED_MAX", 4)
    vaes, files = scene.vaes()
    for side in range(8, 40, 2):
        _is_black(vaes, side)
        assert len(files._uses) <= 4
    for _ in range(USES):
        _is_black(vaes)
    assert len(scene.builder.builds) == 1, "a shape that is used often is built all the same"


def test_a_build_that_cannot_be_made_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process, which fails at once: there are no weights in its folder."""
    (weights,) = small_vae().values()
    target = Target(
        compiler="compile 1",
        torch="1",
        diffusers="1",
        device="x",
        weights_sha256=weights.sha256,
        config_sha256="",
        dtype="float32",
        shape=(1, 4, 8, 8),
    )
    missing = Weights(tmp_path, "", weights.sha256, weights.kind)
    build = build_in_process(missing, target, "cpu", tmp_path / "x.pt2")
    reason, until_s = build.ended(), time.monotonic() + 120
    while reason is None:
        assert time.monotonic() < until_s, "the process has not ended"
        time.sleep(0.05)
        reason = build.ended()
    assert "a VAE is diffusion_pytorch_model" in reason and "status 1" in reason
    assert not (tmp_path / "x.pt2").exists()


@pytest.mark.skipif(not os.environ.get("QUIRE_TEST_LONG"), reason="half a minute: make chaos runs it")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_a_real_engine_is_built_and_makes_the_same_picture(tmp_path: Path) -> None:
    inputs, info = random_latents(1, 64)
    files = EngineFiles(tmp_path / "engines", build_in_process)
    engine = BuiltEngines(files, "compile 1", "cpu", "a processor")
    vaes = DiffusersVaes(small_vae(), engine, VaeSettings())
    plain = vaes.decode(inputs, info)
    until_s = time.monotonic() + 300
    while vaes.build == plain.build:
        assert time.monotonic() < until_s, "no engine was built"
        made = vaes.decode(inputs, info)
        time.sleep(0.1)
    assert made.build == vaes.build or vaes.decode(inputs, info).build == vaes.build
    made = vaes.decode(inputs, info)
    assert int(np.abs(made.pixels[0].astype(int) - plain.pixels[0]).max()) <= 1
    assert [path.suffix for path in (tmp_path / "engines").iterdir()] == [".pt2"], "and nothing else is left"
    assert "torch" in sys.modules
