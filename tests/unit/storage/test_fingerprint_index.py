"""What is here, as a comparison with the index sees it, while chunks come and go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.model.fingerprints import fingerprint
from quire.model.index import Held
from quire_storage.cluster.fingerprint_index import LocalFingerprints
from quire_storage.core.residency import events as ev
from tests.unit.storage.residency_world import World, chunk_of, stored


def _held(key: bytes) -> Held:
    return Held(fingerprint(key), b"", 1)


async def test_keys_are_told_by_fingerprint_and_what_has_come_since_too() -> None:
    keys = [os.urandom(32) for _ in range(5000)]
    arriving = {os.urandom(32)}
    with ThreadPoolExecutor(1) as threads:
        here = await LocalFingerprints.look(iter([keys[:4000], keys[:10], keys[4000:]]), arriving, threads)
    (first,) = arriving
    later, never = os.urandom(32), os.urandom(32)
    assert here.keys([_held(keys[0]), _held(never), _held(first), _held(later), _held(keys[-1])]) == [
        *(keys[0], None, first, None, keys[-1])
    ]
    arriving.add(later)
    assert here.unknown(list(map(_held, (later, never, keys[7])))) == [_held(never)]
    here.mark([*keys[::2], never])
    unmarked = [key for page in here.unmarked() for key in page]
    assert sorted(unmarked) == sorted(keys[1::2])
    with ThreadPoolExecutor(1) as threads:
        nothing = await LocalFingerprints.look(iter(()), set(), threads)
    assert nothing.keys([_held(never)]) == [None] and not list(nothing.unmarked())


def test_a_scan_names_what_stays_and_arrivals_are_noted() -> None:
    """Chunks that are written, dropped and stored again during the scan: none that is here at its end is missed."""
    world = World(drives=1, objects=False)
    for first in range(0, 32, 8):
        stored(world, [chunk_of(first + at) for at in range(4)])
    with world.residency.arriving() as arriving:
        named = set[bytes]()
        scan: Iterator[list[bytes]] = world.residency.scan()
        named.update(next(scan))
        world.drop(chunk_of(11).key)
        world.settle()
        stored(world, [chunk_of(40)])
        for keys in scan:
            named.update(keys)
        here = set(world.residency.keys())
        assert chunk_of(40).key in arriving
        assert here <= named | arriving
    ages = {key: world.residency.age(key) for key in here}
    assert None not in ages.values() and world.residency.age(chunk_of(11).key) is None
    for key in here:
        number = int.from_bytes(key, "big")
        parent = chunk_of(number - 1).key if number % 4 else b""
        if parent in here:
            assert (ages[parent] or 0) < (ages[key] or 0), "in the order of storing"


@pytest.mark.parametrize("noted", [True, False])
def test_what_a_lost_drive_leaves_in_memory_is_noted(noted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan that took it to be on the drive does not come there any more; without the note it is missed."""
    world = World(drives=1, objects=False)
    stored(world, [chunk_of(at) for at in range(4)])
    if not noted:
        monkeypatch.setattr(world.residency.copies, "note_arrival", lambda entry: None)
    with world.residency.arriving() as arriving:
        scan = world.residency.scan()
        named = set(next(scan))
        world.post(ev.DriveLost(0))
        world.settle()
        named.update(*scan)
    here = set(world.residency.keys())
    assert here == {chunk_of(at).key for at in range(4)}
    assert (here <= named | arriving) == noted
