"""The checker of S3 histories says no where it should."""

from __future__ import annotations

from tests.simulation.registers import Kind, Operation, Outcome, is_linearizable


def _write(
    began_s: float, ended_s: float, value: str, expected: str = "", outcome: Outcome = Outcome.DONE
) -> Operation:
    return Operation(Kind.WRITE, began_s, ended_s, value, expected, outcome)


def _read(began_s: float, ended_s: float, value: str | None) -> Operation:
    return Operation(Kind.READ, began_s, ended_s, value)


def test_what_was_overwritten_is_not_read_again() -> None:
    one, two = _write(0, 1, "a"), _write(2, 3, "b")
    assert is_linearizable([one, two, _read(4, 5, "b")])
    assert is_linearizable([one, two, _read(2.5, 5, "a")])
    assert not is_linearizable([one, two, _read(4, 5, "a")])
    assert not is_linearizable([one, two, _read(2.1, 2.2, "b"), _read(2.3, 2.4, "a")])


def test_what_was_acknowledged_is_there() -> None:
    assert not is_linearizable([_write(0, 1, "a"), _read(2, 3, None)])
    assert is_linearizable([_write(0, 1, "a"), Operation(Kind.DELETE, 0, 2), _read(3, 4, None)])
    assert not is_linearizable([Operation(Kind.DELETE, 0, 1), _write(2, 3, "a"), _read(4, 5, None)])


def test_one_writer_wins() -> None:
    both = [_write(0, 2, "a", "absent"), _write(1, 3, "b", "absent")]
    assert not is_linearizable(both)
    assert is_linearizable([both[0], _write(1, 3, "b", "absent", Outcome.REFUSED)])
    assert not is_linearizable([_write(0, 1, "a", "absent", Outcome.REFUSED)])
    assert not is_linearizable([_write(0, 1, "a"), _write(2, 3, "b"), _write(4, 5, "c", "a")])


def test_an_answer_that_was_lost() -> None:
    lost = _write(0, 1, "a", outcome=Outcome.UNKNOWN)
    assert is_linearizable([lost, _read(2, 3, None), _read(4, 5, "a")])
    assert is_linearizable([lost, _read(2, 3, None)])
    assert not is_linearizable([lost, _read(2, 3, "a"), _read(4, 5, None)])
