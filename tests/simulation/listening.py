"""The story of a simulated day, as the index lives it: who registers, what is evicted, which promises end with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.world import Day


def listen(day: Day) -> None:
    """Follow what the index is told."""
    index = day.cluster.metadata.index
    plain = {name: getattr(index, name) for name in ("register", "unregister", "evict", "add_objects")}

    async def register(node_id: str, chunks: Any, now_ms: int, **options: Any) -> Any:
        answer = await plain["register"](node_id, chunks, now_ms, **options)
        for chunk, generation in zip(chunks, answer, strict=True):
            if generation:
                day.tell(f"index: {node_id} registers: {generation:x}", [chunk.key])
        return answer

    async def unregister(node_id: str, chunks: Any, now_ms: int, **options: Any) -> Any:
        answer = await plain["unregister"](node_id, chunks, now_ms, **options)
        for chunk, out in zip(chunks, answer, strict=True):
            day.tell(f"index: {node_id} withdraws: {out}", [chunk.key])
        return answer

    async def evict(chunks: Any, now_ms: int, delete_ms: int, **options: Any) -> Any:
        lost = [chunk.key for chunk in chunks if chunk.key not in index.state.entries]
        answer = await plain["evict"](chunks, now_ms, delete_ms, **options)
        keys = lost + [gone.record.key for gone in answer.removed]
        for key in cut_off(day, keys):
            day.history.ended(key, day.loop.time())
        if keys:
            day.tell("index: evicted", keys)
        return answer

    async def add_objects(chunks: Any, generations: Any) -> Any:
        answer = await plain["add_objects"](chunks, generations)
        for chunk, mark in zip(chunks, answer, strict=True):
            day.tell(f"index: object {mark.name}", [chunk.key])
        return answer

    changed: Any = index
    changed.register, changed.unregister, changed.evict, changed.add_objects = (
        register,
        unregister,
        evict,
        add_objects,
    )


def cut_off(day: Day, evicted: Sequence[bytes]) -> set[bytes]:
    """What was evicted, and what extends it unknown to an index that has just lost its last seconds."""
    gone, known = set(evicted), day.cluster.metadata.index.state.entries
    for prefix in day.prefixes:
        keys = list(prefix.keys)
        first = next((at for at, key in enumerate(keys) if key in gone), len(keys))
        gone.update(key for key in keys[first:] if key not in known)
    return gone
