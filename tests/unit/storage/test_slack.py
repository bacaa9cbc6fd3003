"""Writes wait for reads, but not for ever (Tutti, §3.3)."""

from __future__ import annotations

from quire_storage.core.slack import SlackLimits, WriteGate

MIB = 1 << 20
LIMITS = SlackLimits(quantum_bytes=MIB, idle_bytes=8 * MIB, age_s_max=1.0, backlog_bytes_max=64 * MIB, forced_share=0.1)


def test_an_idle_drive_takes_writes_up_to_a_bound() -> None:
    gate = WriteGate(LIMITS)
    assert gate.room(10.0, 100 * MIB, 10.0) == 8 * MIB
    gate.write_started(8 * MIB, 10.0)
    assert gate.room(10.0, 92 * MIB, 10.0) == 0
    gate.write_finished(8 * MIB)
    assert gate.room(10.1, 92 * MIB, 10.0) == 8 * MIB


def test_a_read_that_is_waited_for_holds_writes_back() -> None:
    gate = WriteGate(LIMITS)
    number = gate.read_started(16 * MIB, due_s=0.0, now_s=10.0)
    assert gate.room(10.0, MIB, 9.9) == 0
    gate.read_finished(number, 10.1)
    assert gate.room(10.1, MIB, 9.9) > 0


def test_a_read_ahead_of_its_consumer_leaves_a_window() -> None:
    """Its compute window is long enough for the read and a quantum of writes; when it has passed, it is not."""
    gate = WriteGate(LIMITS)
    gate.read_started(16 * MIB, due_s=11.0, now_s=10.0)
    assert gate.room(10.0, 4 * MIB, 10.0) == MIB
    gate.write_started(MIB, 10.0)
    assert gate.room(10.0, 3 * MIB, 10.0) == 0, "one quantum at a time"
    gate.write_finished(MIB)
    assert gate.room(10.99, 3 * MIB, 10.0) == 0
    gate.read_started(16 * MIB, due_s=0.0, now_s=10.0)
    assert gate.room(10.0, 3 * MIB, 10.0) == 0, "the most urgent read decides"


def test_old_writes_and_large_backlogs_get_their_share() -> None:
    """A tenth of what reads move, no more, however long the reads go on."""
    gate = WriteGate(LIMITS)
    now, written, read = 10.0, 0, 0
    for _ in range(1000):
        number = gate.read_started(MIB, 0.0, now)
        # The next read is there before this one ends: the drive is never idle.
        other = gate.read_started(MIB, 0.0, now)
        now += 0.001
        gate.read_finished(number, now)
        room = gate.room(now, 1000 * MIB, 0.0)
        if room:
            gate.write_started(room, now)
            gate.write_finished(room)
            written += room
        gate.read_finished(other, now)
        read += 2 * MIB
    assert 0.05 * read < written <= 0.1 * read + 2 * MIB


def test_a_write_is_never_older_than_the_bound_for_long() -> None:
    """Reads that move nothing earn no share: then age alone opens the gate."""
    gate = WriteGate(LIMITS)
    gate.read_started(1, 0.0, 10.0)
    assert gate.room(10.5, 1, 10.0) == 0
    assert gate.room(11.1, 1, 10.0) == MIB


def test_without_slack_scheduling_everything_goes_at_once() -> None:
    gate = WriteGate(LIMITS, enabled=False)
    gate.read_started(16 * MIB, 0.0, 10.0)
    assert gate.room(10.0, 100 * MIB, 10.0) == 100 * MIB
