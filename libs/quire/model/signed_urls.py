"""URLs that let their holder read one image, in one form, until a time: signed with an access key's secret.

    signed_url("/v1/images/cat?preset=thumb", key="QK…", secret="…", expires_s=time.time() + 3600)

The signature is over the unescaped path and query: proxies may escape them otherwise. Other parameters, another image,
another time make another signature. A URL ends with its key: rotate or delete that.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from quire.model.errors import InvalidRequest

_NAMES: Final = ("key", "expires", "signature")
_DIGITS_MAX: Final = 11


@dataclass(frozen=True, slots=True)
class UrlClaim:
    """The claim of a signed URL: the key's name, until when (seconds since the epoch), the signature, and the rest."""

    path: str
    key: str
    expires_s: int
    signature: str
    query: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, path: str, query: Iterable[tuple[str, str]]) -> UrlClaim | None:
        """Read the claim of a path and a query, both unescaped; None for a URL that is not signed.

        Raises `InvalidRequest` for one that is signed by halves.
        """
        pairs = list(query)
        fields = {name: [value for field, value in pairs if field == name] for name in _NAMES}
        if not any(fields.values()):
            return None
        for name, values in fields.items():
            if len(values) != 1 or not values[0]:
                raise InvalidRequest("once, in a signed URL", field=name)
        expires = fields["expires"][0]
        if not (expires.isascii() and expires.isdigit() and len(expires) <= _DIGITS_MAX):
            raise InvalidRequest(f"{expires[:40]!r} is not in seconds since the epoch", field="expires")
        rest = tuple((name, value) for name, value in pairs if name not in _NAMES)
        return cls(path, fields["key"][0], int(expires), fields["signature"][0], rest)

    def is_signed_with(self, secret: str) -> bool:
        """Whether the key with this secret signed it. Takes the same time for every wrong signature."""
        expected = _signature(secret, self.path, self.key, self.expires_s, self.query)
        return hmac.compare_digest(expected.encode(), self.signature.encode())


def signed_url(url: str, *, key: str, secret: str, expires_s: float) -> str:
    """The URL, with or without a host, with `key`, `expires` and `signature`.

    Raises `InvalidRequest` for one that has them.
    """
    parts = urlsplit(url)
    query = tuple(parse_qsl(parts.query, keep_blank_values=True))
    if any(name in _NAMES for name, _ in query):
        raise InvalidRequest("is signed already", field="url")
    signature = _signature(secret, unquote(parts.path), key, int(expires_s), query)
    signed = (*query, ("key", key), ("expires", str(int(expires_s))), ("signature", signature))
    return urlunsplit(parts._replace(query=urlencode(signed)))


def _signature(secret: str, path: str, key: str, expires_s: int, query: tuple[tuple[str, str], ...]) -> str:
    message = "\n".join(("quire url 1", key, str(expires_s), urlencode({"path": path}), urlencode(sorted(query))))
    return hmac.new(secret.encode(), message.encode(), hashlib.sha256).hexdigest()
