"""Test support for Quire and its users: fakes of the ports, contract suites, and a simulator."""

from quire.testing.clock import FakeClock

__all__ = ["FakeClock"]
