"""What clients did and were told, and the model that it is held against."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.model.durability import Durability
from quire.model.hashing import Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from tests.simulation.history import History

LAYOUT = KvLayout(4, 16, 8, 64, Dtype.BF16)
"""128 KiB a chunk."""

NO_ANSWER = "no answer within the deadline"
EXPECTED = {
    "Unavailable",
    "NoStorageNode",
    "NodeUnavailable",
    "MetadataUnavailable",
    "PeerLost",
    "DeadlineExceeded",
    "ResourceExhausted",
    "PoolFull",
    "PartlyStored",
    "DriveFailed",
    "TooManyRequests",
    "ChunkMissing",
    "LeaseExpired",
    "InvalidRequest",
    "TargetInvalid",
    "HTTP 503",
    "HTTP 500",
    "connection",
    NO_ANSWER,
}
"""What may be said while something is broken. An object that was acknowledged and is not found is not among them."""

DEADLINE_S = 20.0
GRACE_S = 3.0


@dataclass(frozen=True)
class Event:
    """One request: what it was, when it began and ended (monotonic seconds), and what came of it.

    `prefix`: which made-up prompt; `chunks`: of it, asked for or stored; `got`: as the answer said. `error` is a code,
    empty for none; `wrong` says that bytes differed.
    """

    op: str
    prefix: int
    chunks: int
    level: str
    began_s: float
    ended_s: float
    got: int = 0
    error: str = ""
    wrong: bool = False


def namespace(seed: int) -> Namespace:
    return Namespace("chaos", str(seed), LAYOUT)


def keys_of(seed: int, prefix: int, chunks: int) -> ChunkKeys:
    """Of a prompt that no other one shares a chunk with."""
    return block_keys(namespace(seed), [prefix * 100_000 + at for at in range(chunks * LAYOUT.chunk_tokens)])


def payload_of(seed: int, prefix: int, chunks: int) -> npt.NDArray[np.uint8]:
    """(layers, chunks, slice bytes): the only bytes that may ever be read under those keys."""
    shape = (chunks, LAYOUT.num_layers, LAYOUT.slice_bytes)
    made = np.random.default_rng([seed, prefix]).integers(0, 256, shape, dtype=np.uint8)
    return np.ascontiguousarray(made.transpose(1, 0, 2))


def object_of(seed: int, name: int) -> bytes:
    generator = np.random.default_rng([seed, name, 7])
    return generator.integers(0, 256, int(generator.integers(1, 300_000)), dtype=np.uint8).tobytes()


def write(file: Path, event: Event) -> None:
    with file.open("a") as out:
        out.write(json.dumps(asdict(event)) + "\n")


def read(file: Path) -> list[Event]:
    if not file.exists():
        return []
    return [Event(**json.loads(line)) for line in file.read_text().splitlines() if line.endswith("}")]


ONE_NODE = ("LOCAL", "REPLICATED", "OBJECT")
MORE_NODES = ("REPLICATED", "OBJECT")
"""Levels that outlive a process, and a node."""


def promised(events: list[Event], levels: Sequence[str] = ONE_NODE) -> dict[int, Event]:
    """By prefix: stores that were acknowledged at one of the levels."""
    kept = [event for event in events if event.op == "store" and not event.error and event.level in levels]
    return {event.prefix: event for event in kept}


def missed(events: list[Event]) -> list[str]:
    """Fetches that missed, while faults went on, what was acknowledged in the object tier before they began."""
    model, found = History(), []
    for event in sorted(events, key=lambda each: each.ended_s):
        key = event.prefix.to_bytes(8, "big")
        if event.op == "store" and not event.error:
            model.acknowledged(key, Durability[event.level], event.began_s, event.ended_s)
        promise = model.promises.get(key)
        if event.op != "fetch" or event.error or promise is None or promise.level is not Durability.OBJECT:
            continue
        if promise.since_s < event.began_s and event.got < event.chunks:
            found.append(f"acknowledged in the object tier, and missed: {event}")
    return found


def promised_objects(events: list[Event]) -> dict[int, bool]:
    """By name: whether an S3 object must be there; those with an unanswered request are left out."""
    state: dict[int, bool] = {}
    unclear: set[int] = set()
    for event in sorted((each for each in events if each.op in ("put", "delete")), key=lambda each: each.ended_s):
        if event.error:
            unclear.add(event.prefix)
        state[event.prefix] = event.op == "put"
    return {name: there for name, there in state.items() if name not in unclear}


def problems(events: list[Event]) -> list[str]:
    """What must not be in a history, whatever was done to the cluster."""
    found = [f"wrong bytes: {event}" for event in events if event.wrong]
    found += [f"late: {event}" for event in events if event.ended_s - event.began_s > DEADLINE_S + GRACE_S]
    found += [f"no answer: {event}" for event in events if event.error == NO_ANSWER]
    found += [f"a fault of ours: {event}" for event in events if event.error and event.error not in EXPECTED]
    return found


def summary(events: list[Event]) -> str:
    done = Counter(event.op for event in events if not event.error)
    failed = Counter(f"{event.op}: {event.error}" for event in events if event.error)
    text = ", ".join(f"{count} {name}" for name, count in sorted(done.items()))
    return text + "; failed: " + (", ".join(f"{count} {name}" for name, count in failed.most_common(8)) or "none")
