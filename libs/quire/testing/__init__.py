"""For tests of Quire and of what is built on it: a clock that a test holds."""

from quire.testing.clock import FakeClock

__all__ = ["FakeClock"]
