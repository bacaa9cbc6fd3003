"""Errors of the storage node; all else comes from `quire.errors`.

InternalError (quire.errors)
└── SlotsUnsettled          a client's memory is still being read into slots that cannot be given back
ConfigInvalid (quire.errors)
└── ForeignPool             the pool on disk is of another node, or of a newer version; it is left alone
"""

from quire.errors import ConfigInvalid, InternalError


class SlotsUnsettled(InternalError):
    """A client's memory is still being read into slots, which therefore cannot be given back."""


class ForeignPool(ConfigInvalid):
    """The pool on disk is of another node, or of a newer version; it is left alone."""
