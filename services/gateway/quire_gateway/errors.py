"""Errors of the gateway; all else comes from `quire.errors`.

TooManyRequests (quire.errors)
└── TransfersExhausted      the gateway's bound on simultaneous transfers is reached
"""

from quire.errors import TooManyRequests


class TransfersExhausted(TooManyRequests):
    """The gateway's bound on simultaneous transfers is reached."""
