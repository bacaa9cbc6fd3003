"""Liveness of a peer, with callbacks for its loss."""

from __future__ import annotations

from collections.abc import Callable

from quire.model.errors import PeerLost


class Liveness:
    """Liveness of one peer. `error`: why it is lost."""

    def __init__(self) -> None:
        self.error: PeerLost | None = None
        self._watchers: list[Callable[[PeerLost], None]] = []

    def on_failure(self, callback: Callable[[PeerLost], None]) -> Callable[[], None]:
        """See `Peer.on_failure`."""
        if self.error is not None:
            callback(self.error)
            return lambda: None
        self._watchers.append(callback)
        return lambda: self._watchers.remove(callback) if callback in self._watchers else None

    def fail(self, error: PeerLost) -> None:
        """Mark it as lost; callbacks run once."""
        if self.error is not None:
            return
        self.error = error
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher(error)

    def check(self) -> None:
        """Raise `PeerLost` if it is lost: a new one, because a raised error keeps its frames, and their memory."""
        if self.error is not None:
            raise PeerLost(self.error.message)
