"""Conditions of requests on images and S3 objects (RFC 9110)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_gateway.core.preconditions import ConditionOutcome, Preconditions, Tags

ETAG = '"abc"'
MODIFIED_S = 1_700_000_000.75  # Tue, 14 Nov 2023 22:13:20 GMT
AT, BEFORE, AFTER = (f"Tue, 14 Nov 2023 22:13:{second} GMT" for second in (20, 19, 21))


@pytest.mark.parametrize(
    ("header", "strong", "weak"),
    [
        ('"abc"', True, True),
        ('W/"abc"', False, True),
        ('"x", W/"abc"', False, True),
        ('"x" ,\t"abc"', True, True),
        (',, "abc",', True, True),
        ('"x, y", "abc"', True, True),
        ('rubbish, "abc"', True, True),
        ("*", True, True),
        (" * ", True, True),
        ('"*"', False, False),
        ('w/"abc"', False, False),
        ("abc", True, True),
        ("x, W/abc", False, True),
        ('"x,"abc"', False, False),
        ('"abc"x, "y"', False, False),
        ('"abcd"', False, False),
        ("", False, False),
    ],
)
def test_lists_of_tags(header: str, strong: bool, weak: bool) -> None:
    """A comma within a tag does not end it; a tag may lack its quotes; the rest is passed over."""
    tags = Tags.parse(header)
    assert (tags.strongly(ETAG), tags.weakly(ETAG)) == (strong, weak)
    assert (tags.strongly(f"W/{ETAG}"), tags.weakly(f"W/{ETAG}")) == (tags.any, weak)


@given(st.lists(st.text(st.characters(min_codepoint=0x23, max_codepoint=0x7E), max_size=8), max_size=5), st.booleans())
def test_what_is_listed_is_found(opaque: list[str], weak: bool) -> None:
    prefix = "W/" if weak else ""
    tags = Tags.parse(", ".join(f'{prefix}"{each}"' for each in opaque))
    assert all(tags.weakly(f'"{each}"') for each in opaque)
    assert all(tags.strongly(f'"{each}"') is not weak for each in opaque)
    assert not tags.weakly('"none of them"')


@given(st.text(max_size=60))
def test_every_header_is_read_to_its_end(header: str) -> None:
    assert len(Tags.parse(header).tags) <= len(header)


@pytest.mark.parametrize(
    ("conditions", "verdict"),
    [
        (Preconditions(), ConditionOutcome.PROCEED),
        (Preconditions(if_none_match=ETAG), ConditionOutcome.NOT_MODIFIED),
        (Preconditions(if_none_match=f"W/{ETAG}"), ConditionOutcome.NOT_MODIFIED),
        (Preconditions(if_none_match='"x"'), ConditionOutcome.PROCEED),
        (Preconditions(if_none_match='"x"', if_modified_since=AFTER), ConditionOutcome.PROCEED),
        (Preconditions(if_modified_since=AT), ConditionOutcome.NOT_MODIFIED),
        (Preconditions(if_modified_since=BEFORE), ConditionOutcome.PROCEED),
        (Preconditions(if_modified_since="yesterday"), ConditionOutcome.PROCEED),
        (Preconditions(if_match=ETAG), ConditionOutcome.PROCEED),
        (Preconditions(if_match="*"), ConditionOutcome.PROCEED),
        (Preconditions(if_match=f"W/{ETAG}"), ConditionOutcome.FAILED),
        (Preconditions(if_match='"x"'), ConditionOutcome.FAILED),
        (Preconditions(if_match=ETAG, if_none_match=ETAG), ConditionOutcome.NOT_MODIFIED),
        (Preconditions(if_match=ETAG, if_unmodified_since=BEFORE), ConditionOutcome.PROCEED),
        (Preconditions(if_unmodified_since=BEFORE), ConditionOutcome.FAILED),
        (Preconditions(if_unmodified_since=AT), ConditionOutcome.PROCEED),
        (Preconditions(if_unmodified_since="never"), ConditionOutcome.PROCEED),
    ],
)
def test_verdicts(conditions: Preconditions, verdict: ConditionOutcome) -> None:
    """In the order of §13.2.2; whole seconds count, and a date that is none is passed over."""
    assert conditions.of_read(ETAG, MODIFIED_S) is verdict


@pytest.mark.parametrize(
    ("if_range", "allowed"),
    [
        ("", True),
        ('"a"', True),
        ('W/"a"', False),
        ('"b"', False),
        ("Thu, 01 Jan 1970 00:16:40 GMT", True),
        ("Thu, 01 Jan 1970 00:16:41 GMT", False),
        ("nonsense", False),
    ],
)
def test_a_part_is_wanted_of_the_same_alone(if_range: str, allowed: bool) -> None:
    """A weak tag says nothing of bytes (RFC 9110, 13.1.5)."""
    assert Preconditions.allow_range(if_range, '"a"', 1000.4) is allowed
    assert not Preconditions.allow_range(if_range, 'W/"a"', 1000.4), "its bytes are others the next time"
