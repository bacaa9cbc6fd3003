"""Errors of the scheduler; all else comes from `quire.model.errors`.

InvalidRequest (quire.model.errors)
├── DemandInvalid       a request whose bytes, window, layers or weight are not positive
└── UnknownLink         a link without a budget here
Unavailable (quire.model.errors)
└── NotLeader           another scheduler leads
"""

from quire.model.errors import InvalidRequest, Unavailable


class DemandInvalid(InvalidRequest):
    """A request whose bytes, window, layers or weight are not positive."""


class UnknownLink(InvalidRequest):
    """A link without a budget here."""


class NotLeader(Unavailable):
    """A call that only the leader serves; another scheduler leads."""
