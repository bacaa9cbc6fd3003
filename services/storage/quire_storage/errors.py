"""Errors of the storage node; all else comes from `quire.errors`.

ConfigInvalid (quire.errors)
└── ForeignPool             the pool on disk is of another node, or of a newer version; it is left alone
"""

from quire.errors import ConfigInvalid


class ForeignPool(ConfigInvalid):
    """The pool on disk is of another node, or of a newer version; it is left alone."""
