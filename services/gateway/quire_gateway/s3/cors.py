"""Cross-origin requests of browsers, by the rules of a bucket (Fetch standard; S3's CORSConfiguration).

A browser sends a preflight (OPTIONS) before some requests, without credentials. Bucket names belong to tenants, so the
name alone does not identify a bucket; a signed URL does, by its access key, and then the bucket's rules decide. Any
other preflight is allowed, whether or not there is such a bucket, so that it reveals nothing. The request that follows
is signed, and is refused if no rule of the bucket allows its origin.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quire_gateway.core.s3_errors import S3Error
from quire_gateway.s3 import xml

SETTING: Final = "cors"
METHODS: Final = ("GET", "PUT", "POST", "DELETE", "HEAD")
_RULES_MAX: Final = 100
_SCHEMA: Final = {
    "CORSRule": dict.fromkeys(
        ("ID", "AllowedHeader", "AllowedMethod", "AllowedOrigin", "ExposeHeader", "MaxAgeSeconds"), None
    )
}
_VARY: Final = "Origin, Access-Control-Request-Headers, Access-Control-Request-Method"


@dataclass(frozen=True, slots=True)
class CorsRule:
    """A rule. Origins and headers are patterns with at most one `*`."""

    origins: tuple[str, ...]
    methods: tuple[str, ...]
    headers: tuple[str, ...]
    exposed: tuple[str, ...]
    max_age_s: str

    def allows(self, origin: str, method: str, headers: Sequence[str]) -> bool:
        """Whether it allows a request of that origin."""
        return (
            method in self.methods
            and any(_fits(pattern, origin) for pattern in self.origins)
            and all(any(_fits(pattern.lower(), header) for pattern in self.headers) for header in headers)
        )

    def answer(self, origin: str) -> dict[str, str]:
        """Return the headers of an answer to a request that it allows."""
        anyone = "*" in self.origins
        answer = {"Access-Control-Allow-Origin": "*" if anyone else origin, "Vary": _VARY}
        answer["Access-Control-Allow-Methods"] = ", ".join(self.methods)
        if not anyone:
            answer["Access-Control-Allow-Credentials"] = "true"
        if self.exposed:
            answer["Access-Control-Expose-Headers"] = ", ".join(self.exposed)
        if self.max_age_s:
            answer["Access-Control-Max-Age"] = self.max_age_s
        return answer


def read_cors(body: bytes) -> tuple[list[CorsRule], bytes]:
    """Return a CORSConfiguration's rules, and the document to keep. Raises `S3Error`."""
    tree = xml.read_tree(body, "CORSConfiguration", _SCHEMA)
    rules = []
    for rule in xml.trees(tree, "CORSRule"):
        ages = [text.strip() for text in xml.texts(rule, "MaxAgeSeconds")]
        parsed = CorsRule(
            tuple(xml.texts(rule, "AllowedOrigin")),
            tuple(xml.texts(rule, "AllowedMethod")),
            tuple(xml.texts(rule, "AllowedHeader")),
            tuple(xml.texts(rule, "ExposeHeader")),
            ages[0] if ages else "",
        )
        if not parsed.origins or not parsed.methods:
            raise S3Error("MalformedXML", "A CORSRule has an AllowedOrigin and an AllowedMethod")
        if foreign := [method for method in parsed.methods if method not in METHODS]:
            raise S3Error("InvalidRequest", f"{foreign[0][:40]} is no AllowedMethod; there are {', '.join(METHODS)}")
        if any(pattern.count("*") > 1 for pattern in (*parsed.origins, *parsed.headers)):
            raise S3Error("InvalidRequest", "AllowedOrigin and AllowedHeader can have one wildcard")
        if not all(text.isprintable() for text in (*parsed.exposed, *parsed.origins)):
            raise S3Error("InvalidRequest", "A header cannot hold control characters")
        if len(ages) > 1 or (parsed.max_age_s and not re.fullmatch("[0-9]{1,9}", parsed.max_age_s)):
            raise S3Error("MalformedXML", "MaxAgeSeconds is a number of seconds")
        rules.append(parsed)
    if not 0 < len(rules) <= _RULES_MAX:
        raise S3Error("MalformedXML", f"{len(rules)} rules; 1 to {_RULES_MAX}")
    return rules, xml.document("CORSConfiguration", tree)


def allowing(rules: Sequence[CorsRule], origin: str, method: str, headers: Sequence[str] = ()) -> CorsRule | None:
    """Return the first rule that allows a request."""
    return next((rule for rule in rules if rule.allows(origin, method, headers)), None)


def asked_headers(headers: Mapping[str, Any]) -> list[str]:
    """Return the headers of a browser's preflight, in lower case."""
    names = str(headers.get("Access-Control-Request-Headers", "")).split(",")
    return [header.strip().lower() for header in names if header.strip()]


def answer_to_anyone(origin: str, method: str, headers: Sequence[str]) -> dict[str, str]:
    """Return the answer to a preflight whose bucket is not known."""
    answer = {"Access-Control-Allow-Origin": origin, "Access-Control-Allow-Methods": method, "Vary": _VARY}
    if headers:
        answer["Access-Control-Allow-Headers"] = ", ".join(headers)
    return answer


def forbidden(why: str) -> S3Error:
    """Return the error for a request that no rule allows."""
    return S3Error("AccessForbidden", f"CORSResponse: {why}")


def _fits(pattern: str, text: str) -> bool:
    start, star, end = pattern.partition("*")
    if not star:
        return pattern == text
    return len(text) >= len(start) + len(end) and text.startswith(start) and text.endswith(end)
