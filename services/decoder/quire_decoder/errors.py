"""Errors of the decoder; all else comes from `quire.model.errors`.

ResourceExhausted (quire.model.errors)
└── DeviceFull          the device has no memory for this decode
"""

from quire.model.errors import ResourceExhausted


class DeviceFull(ResourceExhausted):
    """The device has no memory for this decode."""
