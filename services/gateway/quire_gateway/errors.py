"""Errors of the gateway; all else comes from `quire.model.errors`.

TooManyRequests (quire.model.errors)
├── TransfersExhausted      the gateway's bound on simultaneous transfers is reached
├── TenantExhausted         the tenant's bound on requests, bytes or memory is reached
├── GatewayLate             the gateway has more to do than it manages
├── SessionsExhausted       the gateway's bound on open sessions is reached
└── RequestsExhausted       the bound on a session's requests at the same time is reached
InvalidRequest (quire.model.errors)
├── ParameterUnknown        a query has a parameter that there is not
└── NotAcceptable           the client takes none of the formats that there are
"""

from quire.model.errors import InvalidRequest, TooManyRequests


class TransfersExhausted(TooManyRequests):
    """The gateway's bound on simultaneous transfers is reached."""


class TenantExhausted(TooManyRequests):
    """The tenant's bound on requests, bytes or memory is reached."""


class GatewayLate(TooManyRequests):
    """The gateway has more to do than it manages."""


class SessionsExhausted(TooManyRequests):
    """The gateway's bound on open sessions is reached."""


class RequestsExhausted(TooManyRequests):
    """The bound on a session's requests at the same time is reached."""


class ParameterUnknown(InvalidRequest):
    """A query has a parameter that there is not."""


class NotAcceptable(InvalidRequest):
    """The client takes none of the formats that there are."""
