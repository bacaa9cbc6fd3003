"""Errors of the scheduler; all else comes from `quire.errors`.

InvalidRequest (quire.errors)
├── DemandInvalid       a request whose bytes, window, layers or weight are not positive
└── UnknownLink         a link that has no budget here
Unavailable (quire.errors)
└── NotLeader           another scheduler leads
"""

from quire.errors import InvalidRequest, Unavailable


class DemandInvalid(InvalidRequest):
    """A request whose bytes, window, layers or weight are not positive."""


class UnknownLink(InvalidRequest):
    """A link that has no budget here."""


class NotLeader(Unavailable):
    """Another scheduler leads."""
