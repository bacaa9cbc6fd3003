"""Orders of eviction to compare the node's own with, and the loop that runs any of them over a trace."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quire_storage.core.eviction import Evictor, Kept

Prefix = Sequence[bytes]
_SMALL_SHARE = 0.1
_USES_MAX = 3


@dataclass(slots=True)
class OrderEntry:
    """A chunk in an order."""

    parent: bytes
    size: int


class Forest:
    """Entries, and who is a leaf. Children may come before their parents."""

    def __init__(self) -> None:
        self.entries: dict[bytes, OrderEntry] = {}
        self._children: dict[bytes, int] = {}
        self.used_bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self.entries

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.entries)

    def is_leaf(self, key: bytes) -> bool:
        """Whether nothing here extends it."""
        return key not in self._children

    def enter(self, key: bytes, entry: OrderEntry) -> None:
        assert key not in self.entries, "a chunk enters a tier once"
        self.entries[key] = entry
        self.used_bytes += entry.size
        if entry.parent:
            self._children[entry.parent] = self._children.get(entry.parent, 0) + 1

    def leave(self, key: bytes) -> OrderEntry:
        entry = self.entries.pop(key)
        self.used_bytes -= entry.size
        if entry.parent:
            remaining = self._children[entry.parent] - 1
            if remaining:
                self._children[entry.parent] = remaining
            else:
                del self._children[entry.parent]
        return entry


class LeafLru(Forest):
    """Least recently used first, among leaves. Evaluates the kept leaves again each time."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__()
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def insert(self, key: bytes, parent: bytes, size: int) -> None:
        self.enter(key, OrderEntry(parent, size))
        self._order[key] = None

    def touch(self, key: bytes) -> None:
        if key in self.entries:
            self._order.move_to_end(key)

    def remove(self, key: bytes) -> None:
        if key in self.entries:
            self.leave(key)
            del self._order[key]

    def release(self, key: bytes) -> None:
        return

    def evict(self, is_kept: Kept) -> bytes | None:
        for key in self._order:
            if self.is_leaf(key) and not is_kept(key):
                self.remove(key)
                return key
        return None


class S3Fifo:
    """S3-FIFO (Yang et al., SOSP '23), which knows nothing of prefixes."""

    def __init__(self, capacity_bytes: int) -> None:
        self._small_bytes_max = int(capacity_bytes * _SMALL_SHARE)
        self._queues: tuple[OrderedDict[bytes, int], OrderedDict[bytes, int]] = (OrderedDict(), OrderedDict())
        self._bytes = [0, 0]
        self._uses: dict[bytes, int] = {}
        self._gone: OrderedDict[bytes, None] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        return sum(self._bytes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._uses

    def __len__(self) -> int:
        return len(self._uses)

    def insert(self, key: bytes, parent: bytes, size: int) -> None:
        which = int(key in self._gone)
        self._gone.pop(key, None)
        self._queues[which][key] = size
        self._bytes[which] += size
        self._uses[key] = 0

    def touch(self, key: bytes) -> None:
        if key in self._uses:
            self._uses[key] = min(_USES_MAX, self._uses[key] + 1)

    def remove(self, key: bytes) -> None:
        for which in (0, 1):
            if key in self._queues[which]:
                self._bytes[which] -= self._queues[which].pop(key)
                del self._uses[key]

    def release(self, key: bytes) -> None:
        return

    def evict(self, is_kept: Kept) -> bytes | None:
        small, main = self._queues
        for _ in range((_USES_MAX + 2) * len(self._uses)):
            which = 0 if small and (self._bytes[0] > self._small_bytes_max or not main) else 1
            key = next(iter(self._queues[which]))
            if is_kept(key):
                self._queues[which].move_to_end(key)
            elif which == 0 and self._uses[key] > 1:
                size = small.pop(key)
                main[key], self._uses[key] = size, 0
                self._bytes[0] -= size
                self._bytes[1] += size
            elif which == 1 and self._uses[key] > 0:
                self._uses[key] -= 1
                main.move_to_end(key)
            else:
                self.remove(key)
                if which == 0:
                    self._gone[key] = None
                    while len(self._gone) > max(16, len(main)):
                        self._gone.popitem(last=False)
                return key
        return None


@dataclass(frozen=True, slots=True)
class Hits:
    """Blocks found in memory and on the drives, of all that were asked for."""

    memory: int
    disk: int
    total: int

    @property
    def rate(self) -> float:
        return (self.memory + self.disk) / self.total if self.total else 0.0


def simulate(
    trace: Sequence[Prefix],
    disk: Evictor,
    disk_blocks: int,
    memory: Evictor | None = None,
    memory_blocks: int = 0,
    progress: Callable[[], None] = lambda: None,
    observe: Callable[[int, int], None] = lambda in_memory, on_disk: None,
) -> Hits:
    """Every request looks up its longest prefix, uses it, and stores the rest, as an engine does.

    `observe` is called with the blocks that memory and the drives had, request by request. `memory` lies above `disk`
    and holds nothing that is not there too; every block counts one.
    """
    in_memory = on_disk = total = 0
    for blocks in trace:
        total += len(blocks)
        matched = next((at for at, key in enumerate(blocks) if key not in disk), len(blocks))
        pinned = set(blocks)
        memory_before, disk_before = in_memory, on_disk
        for key in reversed(blocks[:matched]):
            disk.touch(key)
            if memory is not None and key in memory:
                in_memory += 1
                memory.touch(key)
            else:
                on_disk += 1
        observe(in_memory - memory_before, on_disk - disk_before)
        fresh = [at for at in range(matched, len(blocks)) if blocks[at] not in disk]
        _make_room(disk, disk_blocks - len(fresh), pinned, memory)
        for at in reversed(fresh[: max(0, disk_blocks - len(disk))]):
            disk.insert(blocks[at], blocks[at - 1] if at else b"", 1)
        if memory is not None:
            promotable = [at for at, key in enumerate(blocks) if key in disk and key not in memory]
            _make_room(memory, memory_blocks - len(promotable), pinned, None)
            for at in reversed(promotable):
                if len(memory) < memory_blocks:
                    memory.insert(blocks[at], blocks[at - 1] if at else b"", 1)
        progress()
    return Hits(in_memory, on_disk, total)


def belady(trace: Sequence[Prefix], capacity_blocks: int) -> Hits:
    """The optimum, knowing the future: evict the block whose next use is latest."""
    never = len(trace)
    upcoming: dict[bytes, int] = {}
    next_uses: list[list[int]] = []
    for at in range(len(trace) - 1, -1, -1):
        next_uses.append([upcoming.get(key, never) for key in trace[at]])
        upcoming.update(dict.fromkeys(trace[at], at))
    memory_uses: dict[bytes, int] = {}
    order: list[tuple[int, int, bytes]] = []
    hits = total = 0
    for blocks, uses in zip(trace, reversed(next_uses), strict=True):
        total += len(blocks)
        hits += next((at for at, key in enumerate(blocks) if key not in memory_uses), len(blocks))
        for depth, (key, use) in enumerate(zip(blocks, uses, strict=True)):
            memory_uses[key] = use
            heapq.heappush(order, (-use, -depth, key))
        while len(memory_uses) > capacity_blocks:
            use, _, key = heapq.heappop(order)
            if memory_uses.get(key) == -use:
                del memory_uses[key]
    return Hits(0, hits, total)


def _make_room(tier: Evictor, blocks_max: int, pinned: set[bytes], above: Evictor | None) -> None:
    while len(tier) > max(0, blocks_max):
        key = tier.evict(pinned.__contains__)
        if key is None:
            break
        if above is not None:
            above.remove(key)
    for key in pinned:
        tier.release(key)
