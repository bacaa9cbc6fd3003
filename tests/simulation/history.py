"""What a cluster has promised, and whether it keeps it. One model for simulated runs and for real processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from quire.model.durability import Durability

STORED_WITHIN_S: Final = 12.0
"""After which a store has ended, whether its client has heard of that or not."""


class Violation(AssertionError):
    """A promise was broken. The message tells the story of the chunk concerned."""


@dataclass(slots=True)
class Promise:
    """A chunk that was acknowledged at a level."""

    level: Durability
    since_s: float


@dataclass(slots=True)
class History:
    """Stores, ends and reads by key, as they happen. `written`: versions that were ever sent under a key."""

    promises: dict[bytes, Promise] = field(default_factory=dict)
    written: dict[bytes, set[int]] = field(default_factory=dict)
    ended_s: dict[bytes, float] = field(default_factory=dict)
    leases: dict[object, tuple[frozenset[bytes], float, int | None]] = field(default_factory=dict)
    evicted: dict[bytes, float] = field(default_factory=dict)
    last_read: dict[bytes, tuple[int, float]] = field(default_factory=dict)
    index_lost_s: float = -1.0
    store_began_s: dict[bytes, float] = field(default_factory=dict)
    log: deque[tuple[float, str, frozenset[bytes]]] = field(default_factory=lambda: deque(maxlen=20_000))
    counts: dict[str, int] = field(default_factory=dict)

    def tell(self, now_s: float, text: str, keys: Sequence[bytes] = ()) -> None:
        """A line of the story; without keys it belongs to all of them."""
        self.log.append((now_s, text, frozenset(keys)))

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def sent(self, key: bytes, version: int) -> None:
        """A client offers this content under a key."""
        self.written.setdefault(key, set()).add(version)

    def acknowledged(self, key: bytes, level: Durability, began_s: float, now_s: float) -> bool:
        """A store is answered; whether that is a promise: not if the chunk was evicted while it was on its way."""
        if self.ended_s.get(key, -1.0) >= began_s:
            return False
        known = self.promises.get(key)
        if known is None or list(Durability).index(known.level) < list(Durability).index(level):
            self.promises[key] = Promise(level, now_s)
        return True

    def ended(self, key: bytes, now_s: float) -> None:
        """A chunk left the index by eviction."""
        self.promises.pop(key, None)
        self.ended_s[key] = now_s

    def read(self, key: bytes, version: int, began_s: float, now_s: float) -> bool:
        """A read has returned this content; whether the one before returned it too. Not counted are reads that may have
        begun before the chunk was evicted, or before the one that is compared had ended.
        """
        if self.ended_s.get(key, -1.0) >= began_s:
            return True
        previous, at_s = self.last_read.get(key, (version, now_s))
        if previous != version and at_s < began_s and self.ended_s.get(key, -1.0) < at_s:
            return False
        self.last_read[key] = (version, now_s)
        return True

    def void(self, level: Durability) -> None:
        """Something happened that chunks of this level need not survive."""
        self.promises = {key: each for key, each in self.promises.items() if each.level is not level}

    def void_chunk(self, key: bytes, levels: Sequence[Durability]) -> None:
        """Something happened that this chunk need not survive at these levels."""
        if (promise := self.promises.get(key)) is not None and promise.level in levels:
            del self.promises[key]

    def index_lost(self, now_s: float) -> None:
        """The index has lost its leases and evictions, and leases whose clients wait for the answer."""
        self.leases.clear()
        self.evicted.clear()
        self.index_lost_s = now_s

    # ---- leases and evictions

    def stores(self, keys: Sequence[bytes], now_s: float) -> None:
        """A store of these chunks begins: an evicted one may be listed again from now on."""
        for key in keys:
            self.evicted.pop(key, None)
            self.store_began_s[key] = now_s

    def evicts(self, keys: Sequence[bytes], now_s: float) -> None:
        """The index has removed these. They stay unlisted unless a store was running or begins later."""
        for key in keys:
            if self.store_began_s.get(key, -STORED_WITHIN_S) + STORED_WITHIN_S <= now_s:
                self.evicted[key] = now_s

    def leased(
        self, lease: object, keys: Sequence[bytes], asked_s: float, seconds: float, disturbed: int | None = None
    ) -> None:
        """A lease was given on these chunks. `disturbed`: it is sure until another thing goes wrong, as its gateway may
        take its client for gone then.
        """
        if asked_s > self.index_lost_s:
            self.leases[lease] = (frozenset(keys), asked_s + seconds, disturbed)

    def sessions_end(self) -> None:
        """Sessions of clients end, and with them their leases. Retentions stay."""
        self.leases = {lease: each for lease, each in self.leases.items() if isinstance(lease, tuple)}

    def unleased(self, lease: object) -> None:
        """The client is about to release the lease."""
        self.leases.pop(lease, None)

    def is_leased(self, key: bytes, now_s: float, disturbed: int) -> bool:
        """Whether a client has a lease on it."""
        return any(
            key in keys and now_s < until_s and since in (None, disturbed)
            for keys, until_s, since in self.leases.values()
        )

    def story(self, key: bytes) -> str:
        """Everything that was told of a chunk, and of all."""
        lines = [f"{at_s:10.4f}  {text}" for at_s, text, keys in self.log if not keys or key in keys]
        return f"the story of {key.hex()[:12]}:\n" + "\n".join(lines[-400:])

    def fail(self, what: str, key: bytes | None = None) -> Violation:
        return Violation(f"{what}\n{self.story(key)}" if key is not None else what)
