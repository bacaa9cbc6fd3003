"""Stand-ins for what SGLang imports and no registry has for a CPU: kernels for GPUs, images, audio.

Anything that is asked of them is a class that cannot be made.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, Final

_NAMES: Final = {
    "cutlass", "decord", "deep_gemm", "flashinfer", "sgl_kernel", "torchaudio", "torchvision",
}  # fmt: skip


class _Nested(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Stub(types.ModuleType):
    __version__ = "0.4.10"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"{self.__name__}.{name} is not here")

        return _Nested(name, (), {"__init__": refuse})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        known = name.partition(".")[0] in _NAMES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Before SGLang is imported."""
    sys.meta_path.insert(0, _Finder())
