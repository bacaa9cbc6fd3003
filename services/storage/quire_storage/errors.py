"""Errors of the storage node; all else comes from `quire.model.errors`.

InternalError (quire.model.errors)
└── SlotsUnsettled          a client's memory is still being read into slots that cannot be given back
ConfigInvalid (quire.model.errors)
├── ForeignPool             the pool on disk is of another node, or of a newer version; it is left alone
├── DriveUnusable           a drive is too small, or cannot be read or written
└── BlockIOUnavailable      this kernel does not offer the way of doing I/O that was asked for
Unavailable (quire.model.errors)
├── DriveFailed             a drive answers with errors; its chunks are elsewhere, or lost
├── ObjectTierFailed        the object tier does not answer, or refuses
│   └── ObjectTierThrottled it refuses because there are too many requests
└── NotReplicated           no second node took chunks that were to be replicated
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.model.errors import ConfigInvalid, InternalError, Unavailable


class SlotsUnsettled(InternalError):
    """A client's memory is still being read into slots, which therefore cannot be given back."""


class ForeignPool(ConfigInvalid):
    """The pool on disk is of another node, or of a newer version; it is left alone."""


class DriveUnusable(ConfigInvalid):
    """A drive is too small, or cannot be read or written."""


class BlockIOUnavailable(ConfigInvalid):
    """This kernel does not offer the way of doing I/O that was asked for."""


class DriveFailed(Unavailable):
    """A drive answers with errors; its chunks are elsewhere, or lost. `drives`: which, by index."""

    def __init__(self, message: str, drives: frozenset[int] = frozenset()) -> None:
        super().__init__(message)
        self.drives = drives

    def joined(self, failures: Sequence[DriveFailed]) -> DriveFailed:
        """Return an error for all their drives."""
        return DriveFailed(self.message, self.drives.union(*(failure.drives for failure in failures)))


class ObjectTierFailed(Unavailable):
    """The object tier does not answer, or refuses."""


class ObjectTierThrottled(ObjectTierFailed):
    """The object tier refuses because there are too many requests (503 SlowDown, 429)."""


class NotReplicated(Unavailable):
    """No second node took chunks that were to be replicated."""
