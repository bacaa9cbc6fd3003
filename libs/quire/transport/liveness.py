"""Whether a peer is alive, and who is told when it is not any more."""

from __future__ import annotations

from collections.abc import Callable

from quire.model.errors import PeerLost


class Liveness:
    """Of one peer. `error`: why it is lost."""

    def __init__(self) -> None:
        self.error: PeerLost | None = None
        self._watchers: list[Callable[[PeerLost], None]] = []

    def on_failure(self, callback: Callable[[PeerLost], None]) -> Callable[[], None]:
        """As `Peer.on_failure`."""
        if self.error is not None:
            callback(self.error)
            return lambda: None
        self._watchers.append(callback)
        return lambda: self._watchers.remove(callback) if callback in self._watchers else None

    def fail(self, error: PeerLost) -> None:
        """It is lost; told once."""
        if self.error is not None:
            return
        self.error = error
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher(error)

    def check(self) -> None:
        """Raises `PeerLost`: a new one, for what was raised keeps the frames that it went through, and their memory."""
        if self.error is not None:
            raise PeerLost(self.error.message)
