"""Quire: intermediate state of generative inference, kept as small immutable objects.

>>> from quire import Client, KvLayout
>>> layout = KvLayout(num_layers=32, chunk_tokens=16, kv_heads=8, head_dim=128, dtype="bf16")
>>> with Client("127.0.0.1:7410") as client:  # doctest: +SKIP
...     client.cache("llama-3-8b", "a1b2", layout).put(tokens, layers)
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from quire.client import AsyncClient as AsyncClient
    from quire.client import Client as Client
    from quire.client import ImageClient as ImageClient
    from quire.client import Rendering as Rendering
    from quire.model.durability import Durability as Durability
    from quire.model.errors import QuireError as QuireError
    from quire.model.hashing import Namespace as Namespace
    from quire.model.hashing import block_keys as block_keys
    from quire.model.keys import ChunkKeys as ChunkKeys
    from quire.model.layout import Dtype as Dtype
    from quire.model.layout import KvLayout as KvLayout

try:
    __version__ = version("quire")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

PROTOCOL_VERSION = 4
"""What this release speaks. Goes up when a message changes its meaning."""

PROTOCOL_OLDEST = 3
"""The oldest that it understands: from there on all may be used together, as while a cluster is upgraded."""

_PLACES: Final = {
    "AsyncClient": "quire.client",
    "ChunkKeys": "quire.model.keys",
    "Client": "quire.client",
    "Dtype": "quire.model.layout",
    "Durability": "quire.model.durability",
    "ImageClient": "quire.client",
    "KvLayout": "quire.model.layout",
    "Namespace": "quire.model.hashing",
    "QuireError": "quire.model.errors",
    "Rendering": "quire.client",
    "block_keys": "quire.model.hashing",
}
"""Where each public name is: imported when it is used first, so that `quire --help` imports no gRPC."""

__all__ = ["PROTOCOL_OLDEST", "PROTOCOL_VERSION", "__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
