"""SGLang on Quire: `QuireHiCache` under its host pool, `QuireLinker` straight to its device pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.integrations.sglang.hicache import QuireHiCache
    from quire.integrations.sglang.linker import QuireLinker

__all__ = ["QuireHiCache", "QuireLinker"]


def __getattr__(name: str) -> Any:
    """Import each class on first use: an SGLang may have one of the two interfaces alone."""
    if name == "QuireHiCache":
        from quire.integrations.sglang.hicache import QuireHiCache

        return QuireHiCache
    if name == "QuireLinker":
        from quire.integrations.sglang.linker import QuireLinker

        return QuireLinker
    raise AttributeError(name)
