"""Errors of the scheduler; all else comes from `quire.errors`.

InvalidRequest (quire.errors)
└── DemandInvalid       a request whose bytes, layers or weight are not positive
"""

from quire.errors import InvalidRequest


class DemandInvalid(InvalidRequest):
    """A request whose bytes, layers or weight are not positive."""
