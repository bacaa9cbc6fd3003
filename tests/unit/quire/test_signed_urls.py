"""Signed URLs: what is signed cannot be changed, however it is escaped."""

from __future__ import annotations

from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.model.errors import InvalidRequest
from quire.model.signed_urls import UrlClaim, signed_url

SIGN = {"key": "QKA", "secret": "s", "expires_s": 1_900_000_000.0}


def _claim(url: str) -> UrlClaim | None:
    parts = urlsplit(url)
    return UrlClaim.read(unquote(parts.path), parse_qsl(parts.query, keep_blank_values=True))


_NAME = st.characters(codec="utf-8", exclude_characters="?#", exclude_categories=["Cc", "Zs", "Zl", "Zp"])


@given(
    st.text(_NAME, max_size=20),
    st.lists(st.tuples(st.text("abw=&%+ ü", min_size=1, max_size=3), st.text("12/&=% +猫", max_size=4)), max_size=3),
)
def test_what_was_signed_is_accepted(name: str, query: list[tuple[str, str]]) -> None:
    """And nothing else: another image, parameter, time, key or secret."""
    escaped = "&".join(f"{quote(key, safe='')}={quote(value, safe='')}" for key, value in query)
    url = signed_url(f"http://h/v1/images/{quote(name)}?{escaped}", **SIGN)  # type: ignore[arg-type]
    claim = _claim(url)
    assert claim is not None and claim.path == f"/v1/images/{name}" and claim.query == tuple(query)
    assert claim.is_signed_with("s") and not claim.is_signed_with("t")
    signed = tuple(query), claim.signature
    for other in (
        UrlClaim(claim.path + "x", "QKA", claim.expires_s, claim.signature, tuple(query)),
        UrlClaim(claim.path, "QKB", claim.expires_s, claim.signature, tuple(query)),
        UrlClaim(claim.path, "QKA", claim.expires_s + 1, claim.signature, tuple(query)),
        UrlClaim(claim.path, "QKA", claim.expires_s, claim.signature, (*query, ("w", "1"))),
        UrlClaim(claim.path, "QKA", claim.expires_s, claim.signature + "0", tuple(query)),
    ):
        assert not other.is_signed_with("s"), signed


def test_urls_that_are_signed_by_halves() -> None:
    assert _claim("/v1/images/cat?w=1") is None
    for query in (
        "key=a",
        "key=a&expires=1",
        "key=a&expires=1&signature=",
        "key=a&key=b&expires=1&signature=x",
        "key=a&expires=-1&signature=x",
        "key=a&expires=1e9&signature=x",
        "key=a&expires=999999999999&signature=x",
        "key=a&expires=١&signature=x",
    ):
        with pytest.raises(InvalidRequest):
            _claim(f"/v1/images/cat?{query}")
    with pytest.raises(InvalidRequest, match="already"):
        signed_url("/v1/images/cat?key=a", **SIGN)  # type: ignore[arg-type]
