"""Choice of the decoder for an image (LatentBox, §4.4): joined, at its owner, or at the least busy decoder.

An id's owner is the decoder with the strongest claim on it (rendezvous hashing: one that joins or leaves moves only its
share). Above `theta` requests for each device of the owner the work goes to the least busy one; its image goes into the
owner's cache. Requests for an id that is being decoded go where that happens, to wait for it there.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.model.nodes import DecoderInfo, Node
from quire_server.core.placement import rendezvous


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


@dataclass(slots=True)
class _Running:
    record_name: bytes
    runner: Node
    since_s: float


class ImageRouter:
    """Counts what runs where. Every method takes the time; tickets that are not given back run out."""

    def __init__(self, theta: int, ticket_s: float, failed_s: float = 3.0) -> None:
        self._theta = theta
        self._ticket_s = ticket_s
        self._failed_s = failed_s
        self._failed: dict[str, float] = {}
        self._running: OrderedDict[int, _Running] = OrderedDict()
        self._at: dict[bytes, list[int]] = {}
        self._depth: dict[str, int] = {}
        self._next = secrets.randbits(48)  # a ticket of before a restart means nothing after it
        self.joined = self.spilled = 0
        self.build = ""
        """Of the decoder that was chosen last: of what there would be, were there one."""

    def depth(self, node: Node) -> float:
        """Return the requests for each device of a decoder.

        As counted here, or as it reported itself, if that is more: other orchestrators send requests too.
        """
        routed = self._depth.get(node.node_id, 0)
        if not isinstance(node.about, DecoderInfo):
            return routed
        return max(routed, node.about.queued) / node.about.devices

    def route(self, record_name: bytes, decoders: Sequence[Node], now_s: float) -> Route | None:
        """Route a request; None without a decoder. One that has just failed is passed over while there is another."""
        self._expire(now_s)
        if not decoders:
            return None
        usable = [node for node in decoders if self._failed.get(node.node_id, 0.0) <= now_s] or list(decoders)
        owner = rendezvous(record_name, usable)[0]
        by_name = {node.node_id: node for node in usable}
        running = [self._running[ticket] for ticket in self._at.get(record_name, [])]
        runner = next((by_name[decode.runner.node_id] for decode in running if decode.runner.node_id in by_name), None)
        is_running = runner is not None
        if runner is None:
            runner = owner
            if self.depth(owner) > self._theta:
                equals = [node for node in usable if build_of(node) == build_of(owner)]
                runner = min(equals, key=lambda node: (self.depth(node), node.node_id != owner.node_id))
        self.joined += is_running
        self.spilled += not is_running and runner.node_id != owner.node_id
        ticket, self._next = self._next, self._next + 1
        self._running[ticket] = _Running(record_name, runner, now_s)
        self._at.setdefault(record_name, []).append(ticket)
        self._depth[runner.node_id] = self._depth.get(runner.node_id, 0) + 1
        self.build = build_of(runner)
        return Route(ticket, runner, owner, is_running)

    def failed(self, node_ids: Iterable[str], now_s: float) -> None:
        """Decoders that did not answer a gateway: they are passed over for a while."""
        for name in node_ids:
            self._failed[name] = max(self._failed.get(name, 0.0), now_s + self._failed_s)

    def finish(self, ticket: int, *, failed_at_s: float | None = None) -> bool:
        """A request has ended; whether it was known. `failed_at_s`: when, if the decoder did not answer."""
        entry = self._running.pop(ticket, None)
        if entry is None:
            return False
        if failed_at_s is not None:
            self._failed[entry.runner.node_id] = failed_at_s + self._failed_s
        tickets = self._at[entry.record_name]
        tickets.remove(ticket)
        if not tickets:
            del self._at[entry.record_name]
        name = entry.runner.node_id
        self._depth[name] -= 1
        if not self._depth[name]:
            del self._depth[name]
        return True

    def _expire(self, now_s: float) -> None:
        self._failed = {name: until_s for name, until_s in self._failed.items() if until_s > now_s}
        while self._running:
            ticket, entry = next(iter(self._running.items()))
            if now_s - entry.since_s < self._ticket_s:
                return
            self.finish(ticket)
