"""Fetch or compute: how much of a cached prefix to take, so that the first token comes soonest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from quire.model.layout import KvLayout
from quire.model.profile import ComputeProfile, ttft_s

_CANDIDATES_MAX: Final = 257


@dataclass(frozen=True, slots=True)
class FetchAdvice:
    """Take `chunks` of those that matched. Predicted seconds to the first token then, with all, and with none."""

    chunks: int
    window_s: float
    rate_bytes_per_s: int
    ttft_s: float
    ttft_all_s: float
    ttft_none_s: float


def advise(
    profile: ComputeProfile, layout: KvLayout, prompt_tokens: int, matched: int, rate_bytes_per_s: int, fixed_s: float
) -> FetchAdvice:
    """Evaluate Eq. 3 of ObjectCache for every number of chunks (for long prefixes, for 257 of them).

    `fixed_s`: cost of a fetch besides its bytes. The rest, always the tail, is computed.
    """
    chunks = np.unique(np.linspace(0, matched, min(matched + 1, _CANDIDATES_MAX)).astype(np.int64))
    cached = np.minimum(chunks * layout.chunk_tokens, prompt_tokens - 1)
    windows = profile.window_s(prompt_tokens - cached, cached)
    transfers = chunks * layout.slice_bytes / rate_bytes_per_s
    expected = ttft_s(transfers, windows, layout.num_layers) + np.where(chunks > 0, fixed_s, 0.0)
    best = int(np.argmin(expected))
    return FetchAdvice(
        int(chunks[best]),
        float(windows[best]),
        rate_bytes_per_s,
        float(expected[best]),
        float(expected[-1]),
        float(expected[0]),
    )
