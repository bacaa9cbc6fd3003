"""For tests of Quire and of what is built on it: fakes of the ports, contract suites, and a simulator."""

from quire.testing.clock import FakeClock

__all__ = ["FakeClock"]
