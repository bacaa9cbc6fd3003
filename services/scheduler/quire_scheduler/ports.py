"""What the scheduler needs from outside: the clock alone."""

from quire.clock import Clock

__all__ = ["Clock"]
