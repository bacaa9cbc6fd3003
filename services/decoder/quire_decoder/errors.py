"""Errors of the decoder; all else comes from `quire.errors`.

ResourceExhausted (quire.errors)
└── DeviceFull          the device has no memory for this decode
"""

from quire.errors import ResourceExhausted


class DeviceFull(ResourceExhausted):
    """The device has no memory for this decode."""
