"""Choice of the engine that prefills a prompt: facts about each engine, and the answer (ObjectCache, §3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from quire.model.errors import InvalidRequest

ENGINES_MAX: Final = 4096
"""Of one question."""
TOKENS_MAX: Final = (1 << 32) - 1
"""Of a prompt, and of a queue."""
_TOKENS_PER_S_MIN: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine that may prefill.

    Attributes:
        name: As the answer names it.
        host: Its machine; storage nodes there are reached through shared memory. Empty for unknown.
        cached_tokens: Tokens from the start of the prompt that it has in its own memory, as its KV events say.
        queued_tokens: Tokens that it computes before this prompt.
        tokens_per_s: Rate at which it was measured to prefill; 1 at least.
    """

    name: str
    host: str = ""
    cached_tokens: int = 0
    queued_tokens: int = 0
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineTable:
    """Engines in columns: names and hosts, and (engines,) arrays of the rest of `Engine`.

    Raises:
        InvalidRequest: There is none, or too many; columns differ in length, or a value is invalid.
    """

    names: Sequence[str]
    hosts: Sequence[str]
    cached_tokens: npt.NDArray[np.int64]
    queued_tokens: npt.NDArray[np.int64]
    tokens_per_s: npt.NDArray[np.float64]

    def __post_init__(self) -> None:
        count = len(self.names)
        if not 1 <= count <= ENGINES_MAX:
            raise InvalidRequest(f"{count} engines, 1 to {ENGINES_MAX}", field="engines")
        if {len(self.hosts), len(self.cached_tokens), len(self.queued_tokens), len(self.tokens_per_s)} != {count}:
            raise InvalidRequest("columns of different lengths", field="engines")
        if "" in self.names or len(set(self.names)) < count:
            raise InvalidRequest("a name is empty, or two engines have it", field="engines.name")
        for name, column in (("cached_tokens", self.cached_tokens), ("queued_tokens", self.queued_tokens)):
            if not 0 <= column.min() <= column.max() <= TOKENS_MAX:
                raise InvalidRequest(f"a number is not in 0..{TOKENS_MAX}", field=f"engines.{name}")
        if not np.all((self.tokens_per_s >= _TOKENS_PER_S_MIN) & (self.tokens_per_s < math.inf)):
            raise InvalidRequest(f"a rate is below {_TOKENS_PER_S_MIN:g}, or no number", field="engines.tokens_per_s")

    @classmethod
    def of(cls, engines: Sequence[Engine]) -> EngineTable:
        """Return engines as columns."""
        return cls(
            names=[engine.name for engine in engines],
            hosts=[engine.host for engine in engines],
            cached_tokens=np.array([engine.cached_tokens for engine in engines], dtype=np.int64),
            queued_tokens=np.array([engine.queued_tokens for engine in engines], dtype=np.int64),
            tokens_per_s=np.array([engine.tokens_per_s for engine in engines], dtype=np.float64),
        )


@dataclass(frozen=True, slots=True)
class Assignment:
    """The engine that is to prefill.

    Attributes:
        engine: Its name.
        take_chunks: Chunks from the start of the prompt that it is to have, from its own memory or from Quire.
        ttft_s: Time to first token that each engine was expected to have, in the order of the question.
    """

    engine: str
    take_chunks: int
    ttft_s: Sequence[float]
