"""Conditions of a request on a resource with an entity tag (RFC 9110, §8.8.3 and §13)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Final

_TAG: Final = re.compile(r'(W/)?(?:("[\x21\x23-\x7e\x80-\xff]*")|([^\s",]+))[ \t]*')
_SEPARATOR: Final = re.compile(r"[ \t]*(?:,[ \t]*)*")


class ConditionOutcome(Enum):
    """Outcome of a request's conditions: answer it, answer 304, or answer 412."""

    PROCEED = 1
    NOT_MODIFIED = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class Tags:
    """A list of entity tags. `any`: it was `*`; `tags`: (weak, tag with its quotes).

    A tag without quotes counts as one with them, as S3's clients write it; anything else is passed over.
    """

    any: bool
    tags: tuple[tuple[bool, str], ...]

    @classmethod
    def parse(cls, header: str) -> Tags:
        """Parse If-Match or If-None-Match. A comma within a tag does not end it."""
        if header.strip() == "*":
            return cls(True, ())
        tags, at = list[tuple[bool, str]](), 0
        while at < len(header):
            at = _end(_SEPARATOR.match(header, at), at)
            tag = _TAG.match(header, at)
            end = _end(tag, at)
            if tag is not None and header[end : end + 1] in ("", ","):
                tags.append((tag[1] is not None, tag[2] or f'"{tag[3]}"'))
            comma = header.find(",", end)
            at = len(header) if comma < 0 else comma
        return cls(False, tuple(tags))

    def strongly(self, etag: str) -> bool:
        """Whether a strong `etag` is among them: weak ones never are."""
        return self.any or (False, etag) in self.tags

    def weakly(self, etag: str) -> bool:
        """Whether one of them has the same opaque tag as `etag`, which may be weak itself."""
        return self.any or any(tag == etag.removeprefix("W/") for _, tag in self.tags)


@dataclass(frozen=True, slots=True)
class Preconditions:
    """The received headers; "" for none."""

    if_match: str = ""
    if_none_match: str = ""
    if_modified_since: str = ""
    if_unmodified_since: str = ""

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Preconditions:
        """Take them from a request's headers, whatever their case."""
        names = ("If-Match", "If-None-Match", "If-Modified-Since", "If-Unmodified-Since")
        return cls(*(headers.get(name, "") for name in names))

    @staticmethod
    def allow_range(if_range: str, etag: str, modified_s: float) -> bool:
        """Return whether a part of the entity with that tag is wanted, by If-Range (§13.1.5); else all of it.

        Never with a weak tag: its bytes differ the next time.
        """
        if etag.startswith("W/"):
            return False
        if not if_range:
            return True
        if if_range.startswith(('"', "W/")):
            return if_range == etag
        return int(modified_s) == _seconds(if_range, float("nan"))

    @property
    def of_write(self) -> bool:
        """Whether they say anything of a PUT."""
        return bool(self.if_match or self.if_none_match)

    def allows_write(self, etag: str | None) -> bool:
        """Return whether a PUT is allowed if the current entity has that strong tag; None: there is none."""
        if self.if_match and (etag is None or not Tags.parse(self.if_match).strongly(etag)):
            return False
        return not (self.if_none_match and etag is not None and Tags.parse(self.if_none_match).weakly(etag))

    def of_read(self, etag: str, modified_s: float) -> ConditionOutcome:
        """Return the outcome for a GET or HEAD of an entity with that tag and Unix time (§13.2.2)."""
        if self.if_match:
            if not Tags.parse(self.if_match).strongly(etag):
                return ConditionOutcome.FAILED
        elif int(modified_s) > _seconds(self.if_unmodified_since, float("inf")):
            return ConditionOutcome.FAILED
        if self.if_none_match:
            return (
                ConditionOutcome.NOT_MODIFIED
                if Tags.parse(self.if_none_match).weakly(etag)
                else ConditionOutcome.PROCEED
            )
        unchanged = int(modified_s) <= _seconds(self.if_modified_since, float("-inf"))
        return ConditionOutcome.NOT_MODIFIED if unchanged else ConditionOutcome.PROCEED


def _end(matched: re.Match[str] | None, otherwise: int) -> int:
    return matched.end() if matched is not None else otherwise


def _seconds(header: str, otherwise: float) -> float:
    """Parse a date; an invalid one is passed over (§13.1.3)."""
    try:
        return parsedate_to_datetime(header).timestamp() if header else otherwise
    except (ValueError, TypeError, OverflowError):
        return otherwise
