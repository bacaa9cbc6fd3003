"""Choice of the decoder for an image (LatentBox, §4.4): joined, at its owner, or at the least busy decoder.

An id's owner is the decoder with the strongest claim on it (rendezvous hashing: one that joins or leaves moves only its
share). Above `theta` requests for each device of the owner the work goes to the least busy one; its image goes into the
owner's cache. Requests for an id that is being decoded go where that happens, to wait for it there.

What runs where is in Redis, and the script that reads it chooses: orchestrators decide as one.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.nodes import DecoderInfo, Node
from quire_server.core.decoding import Candidate


@dataclass(frozen=True, slots=True)
class Route:
    """Ask `runner`; the cache entry is `owner`'s. `joined`: the same record is being decoded there already."""

    ticket: int
    runner: Node
    owner: Node
    joined: bool


def build_of(node: Node) -> str:
    """Facts that a decoder's images depend on; "" for other nodes."""
    return node.about.build if isinstance(node.about, DecoderInfo) else ""


def candidate(node: Node) -> Candidate:
    """Return what the choice of a decoder depends on."""
    about = node.about if isinstance(node.about, DecoderInfo) else DecoderInfo()
    return Candidate(node.node_id, about.build, about.devices, about.queued)
