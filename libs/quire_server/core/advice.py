"""Fetch or compute: how much of a cached prefix to take, so that the first token comes soonest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from quire.model.layout import KvLayout
from quire.model.object_part import ObjectPart
from quire.model.profile import ComputeProfile, ttft_s

_CANDIDATES_MAX: Final = 257
_NOTHING: Final = ObjectPart()


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
    profile: ComputeProfile,
    layout: KvLayout,
    prompt_tokens: int,
    matched: int,
    rate_bytes_per_s: int,
    fixed_s: float,
    objects: ObjectPart = _NOTHING,
) -> FetchAdvice:
    """Evaluate Eq. 3 of ObjectCache for every number of chunks (for long prefixes, for 257 of them).

    A layer takes as long as the link, or the object tier, whichever is slower; the object tier's requests come on top
    once, before layer 0.

    Args:
        profile: Of the model on the device.
        layout: Of the chunks.
        prompt_tokens: Length of the prompt. What is not fetched, always the tail, is computed.
        matched: Chunks that can be fetched.
        rate_bytes_per_s: Of the link.
        fixed_s: Cost of a fetch besides its bytes.
        objects: Part that only the object tier has.
    """
    chunks = np.unique(np.linspace(0, matched, min(matched + 1, _CANDIDATES_MAX)).astype(np.int64))
    cached = np.minimum(chunks * layout.chunk_tokens, prompt_tokens - 1)
    windows = profile.window_s(prompt_tokens - cached, cached)
    requests_s = objects.seconds(chunks, 0)
    reads = objects.seconds(chunks, layout.slice_bytes) - requests_s
    transfers = np.maximum(chunks * layout.slice_bytes / rate_bytes_per_s, reads)
    expected = ttft_s(transfers, windows, layout.num_layers) + np.where(chunks > 0, fixed_s + requests_s, 0.0)
    best = int(np.argmin(expected))
    return FetchAdvice(
        int(chunks[best]),
        float(windows[best]),
        rate_bytes_per_s,
        float(expected[best]),
        float(expected[-1]),
        float(expected[0]),
    )
