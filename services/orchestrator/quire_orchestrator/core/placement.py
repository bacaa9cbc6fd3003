"""Where new chunks go.

They are cut into ranges, and each range goes to the node with the strongest claim on its first chunk. So a shared
beginning does not draw all conversations to one node, and a node that joins or leaves moves only its share. Loads are
bounded (Mirrokni, Thorup and Zadimoghaddam, Consistent Hashing with Bounded Loads): a node that is fuller than the mean
by more than a tenth is passed over. The ranges of one request go to different nodes, as far as there are any: it is
read by all their links. A chain that grows at its end goes on where its end lies, until that range is full.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Final

import numpy as np
import numpy.typing as npt

from quire.model.keys import ChunkKeys
from quire.model.nodes import Node
from quire.model.ranges import ChunkRange
from quire_server.core.claims import claims_by_capacity
from quire_server.core.placement import cut, extend

_BOUND: Final = 1.1
_SLACK_BYTES: Final = 128 << 20
"""By which any node may be over the mean: while there is little, it stays where its claims are."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a chain that nothing else extends: its node, and how many chunks more its range may have."""

    node_id: str
    room: int


class _Picture:
    """Arrays about `nodes`, shared by all requests until a node reports again."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self.claims = claims_by_capacity(nodes)
        self.by_name = {node.node_id: at for at, node in enumerate(nodes)}
        self.capacity = np.array([max(1, node.capacity_bytes) for node in nodes], dtype=np.float64)
        self.used = np.array([node.used_bytes for node in nodes], dtype=np.float64)

    def is_of(self, nodes: Sequence[Node]) -> bool:
        """Whether it was made of these same objects, in this order. A node that reports is a new object."""
        return len(nodes) == len(self._nodes) and all(map(is_, nodes, self._nodes))


@dataclass(frozen=True, slots=True)
class _Sent:
    node_id: str
    size: int
    until_s: float


class Placement:
    """Remembers its placements for `memory_s`, in which nodes report them."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._sent: OrderedDict[bytes, _Sent] = OrderedDict()
        self._sent_bytes: Counter[str] = Counter()
        self._picture = _Picture(())

    def place(
        self,
        keys: ChunkKeys,
        first: int,
        nodes: Sequence[Node],
        chunk_bytes: int,
        now_s: float,
        tail: Tail | None = None,
    ) -> list[ChunkRange]:
        """Return nodes for the chunks from `first` on. A chunk that was placed a moment ago has the same node again."""
        if first >= len(keys):
            return []
        self._forget(now_s)
        if not self._picture.is_of(nodes):
            self._picture = _Picture(nodes)
        claims, by_name, capacity = self._picture.claims, self._picture.by_name, self._picture.capacity
        loads = self._loads()
        if tail is not None and tail.node_id not in by_name:
            tail = None
        bounds = cut(first, len(keys), chunk_bytes, tail.room if tail is not None else 0)
        scores = claims.scores([keys.at(at) for at, _ in bounds])
        ranges: list[ChunkRange] = []
        taken = np.zeros(len(nodes), dtype=np.bool_)
        for (at, stop), claim in zip(bounds, scores, strict=True):
            key, size = keys.at(at), (stop - at) * chunk_bytes
            previous = self._take_back(key)
            if previous is not None and previous.node_id in by_name:
                chosen = by_name[previous.node_id]
                loads[chosen] -= previous.size
            else:
                fits = loads <= _BOUND * capacity * (loads.sum() / capacity.sum()) + _SLACK_BYTES
                if not (fits & ~taken).any():
                    taken[:] = False
                chosen = int(np.argmax(np.where(fits & ~taken, claim, -1.0)))
                if tail is not None and at == first and fits[by_name[tail.node_id]]:
                    chosen = by_name[tail.node_id]
            loads[chosen] += size
            taken[chosen] = True
            name = nodes[chosen].node_id
            self._sent[key] = _Sent(name, size, now_s + self._memory_s)
            self._sent_bytes[name] += size
            extend(ranges, ChunkRange(name, at, stop - at))
        return ranges

    def _loads(self) -> npt.NDArray[np.float64]:
        loads, by_name = self._picture.used.copy(), self._picture.by_name
        for name, size in self._sent_bytes.items():
            if name in by_name:
                loads[by_name[name]] += size
        return loads

    def _take_back(self, key: bytes) -> _Sent | None:
        sent = self._sent.pop(key, None)
        if sent is not None:
            self._sent_bytes[sent.node_id] -= sent.size
            if not self._sent_bytes[sent.node_id]:
                del self._sent_bytes[sent.node_id]
        return sent

    def _forget(self, now_s: float) -> None:
        while self._sent:
            key, sent = next(iter(self._sent.items()))
            if sent.until_s > now_s:
                return
            self._take_back(key)
