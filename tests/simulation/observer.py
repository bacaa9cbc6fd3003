"""The story of a simulated day, as the index lives it: who registers, what is evicted, which promises end with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from quire.model.fingerprints import PRINT_BYTES, fingerprint
from quire.model.index import OBJECT_TIER
from quire.model.keys import KEY_BYTES

if TYPE_CHECKING:
    from tests.simulation.world import Day


def listen(day: Day) -> None:
    """Record the index's changes at the moment at which Redis has run a script."""
    chains = [*day.prefixes, day.unchained.chunks]
    keys_by_print = {fingerprint(key): key for prefix in chains for key in prefix.keys}

    def keys_of(packed: bytes, step: int = PRINT_BYTES) -> Iterator[bytes]:
        for at in range(0, len(packed), step):
            print_ = packed[at : at + PRINT_BYTES]
            yield keys_by_print.get(print_, print_)

    def executed(name: str, arguments: list[Any], answer: Any) -> None:
        match name:
            case "register":
                if arguments[0] == OBJECT_TIER:  # a rebuilding lists what it finds, evicted or not
                    for key in keys_of(arguments[4], 2 * PRINT_BYTES):
                        day.history.evicted.pop(key, None)
                for at, key in enumerate(keys_of(arguments[4], 2 * PRINT_BYTES)):
                    mark = answer[9 * at : 9 * at + 9]
                    if mark[:1] != b"0":
                        day.tell(f"index: {arguments[0]} registers: {mark[1:].hex()}", [key])
            case "unregister":
                for mark, key in zip(answer[0], keys_of(arguments[5]), strict=True):
                    day.tell(f"index: {arguments[0]} withdraws: {mark == ord('1')}", [key])
            case "add_objects":
                for mark, key in zip(answer, keys_of(arguments[0]), strict=True):
                    day.tell(f"index: object {chr(mark)}", [key])
            case "evict":
                packed, answers = arguments[5], answer[1 + answer[0] :]
                keys = [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
                outcomes = list(zip(keys, answers[: len(keys)], strict=True))
                unlisted = [key for key, outcome in outcomes if outcome != b"kept"]
                removed = [key for key, outcome in outcomes if outcome not in (b"kept", b"absent")]
                for key in removed:
                    if day.history.is_leased(key, day.loop.time(), day.disturbed):
                        day.loop.failures.append({"exception": day.history.fail("evicted under a lease", key)})
                day.history.evicts(removed, day.loop.time())
                for key in cut_off(day, unlisted):
                    day.history.ended(key, day.loop.time())
                if unlisted:
                    day.tell("index: evicted", unlisted)

    day.cluster.metadata.executed = executed


def cut_off(day: Day, evicted: Sequence[bytes]) -> set[bytes]:
    """What was evicted, and what extends it unknown to an index that has just lost its last seconds."""
    unlisted, entries = set(evicted), day.cluster.metadata.entries()
    for prefix in day.prefixes:
        keys = list(prefix.keys)
        first = next((at for at, key in enumerate(keys) if key in unlisted), len(keys))
        unlisted.update(key for key in keys[first:] if fingerprint(key) not in entries)
    return unlisted
