"""Readiness of a service for requests, and its missing dependencies: the answer of `/readyz`."""

from __future__ import annotations

from typing import Final


class Readiness:
    """Ready while the service serves, and once all its dependencies were reached.

    It stays ready when a dependency fails later: requests then fail or miss, and a service without callers would turn
    one failure into two. A dependency that refuses this service ends its readiness.
    """

    def __init__(self) -> None:
        self._is_serving = False
        self._waits: dict[str, str] = {}

    def serve(self, is_serving: bool) -> None:
        """Say whether requests are taken."""
        self._is_serving = is_serving

    def wait(self, dependency: str, why: str) -> None:
        """Wait for a dependency, until `reached`."""
        self._waits[dependency] = why

    def reached(self, dependency: str) -> None:
        """Say that a dependency is there, and accepts this service."""
        self._waits.pop(dependency, None)

    @property
    def why_not(self) -> str:
        """Missing dependencies and their reasons; "" if it is ready."""
        if not self._is_serving and not self._waits:
            return "not serving"
        return "; ".join(f"{dependency}: {why}" for dependency, why in self._waits.items())


readiness: Final = Readiness()
"""Of this process."""
