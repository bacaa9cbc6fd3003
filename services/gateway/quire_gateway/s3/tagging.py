"""Tags of objects and of buckets: as a document, and as the header of a write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import parse_qsl

from quire_gateway.core.s3_errors import S3Error
from quire_gateway.s3 import xml

OBJECT_TAGS_MAX: Final = 10
BUCKET_TAGS_MAX: Final = 50
_KEY_MAX, _VALUE_MAX = 128, 256
_SCHEMA: Final = {"TagSet": {"Tag": {"Key": None, "Value": None}}}


def read_tagging(body: bytes, at_most: int) -> dict[str, str]:
    """Read a Tagging document. Raises `S3Error` MalformedXML, InvalidTag."""
    pairs = []
    for tag_set in xml.trees(xml.read_tree(body, "Tagging", _SCHEMA), "TagSet"):
        for tag in xml.trees(tag_set, "Tag"):
            keys = [value for name, value in tag if name == "Key"]
            values = [value for name, value in tag if name == "Value"]
            if len(keys) != 1 or len(values) != 1:
                raise S3Error("MalformedXML", "A Tag has one Key and one Value")
            pairs.append((keys[0], values[0]))
    return _checked(pairs, at_most)


def tags_of_header(header: str) -> dict[str, str]:
    """Read `x-amz-tagging`: tags of a new object, as in a query. Raises `S3Error` InvalidArgument, InvalidTag."""
    try:
        pairs = parse_qsl(header, keep_blank_values=True, errors="strict")
    except ValueError:
        raise S3Error("InvalidArgument", "x-amz-tagging is key=value&key=value, percent-encoded UTF-8") from None
    return _checked(pairs, OBJECT_TAGS_MAX)


def tagging_document(tags: Mapping[str, str]) -> bytes:
    """Return the Tagging document of tags."""
    children: list[tuple[str, Any]] = [("Tag", [("Key", key), ("Value", value)]) for key, value in sorted(tags.items())]
    return xml.document("Tagging", [("TagSet", children)])


def _checked(pairs: list[tuple[str, str]], at_most: int) -> dict[str, str]:
    if len(pairs) > at_most:
        raise S3Error("InvalidTag", f"{len(pairs)} tags; {at_most} at most")
    for key, value in pairs:
        if not 0 < len(key) <= _KEY_MAX or len(value) > _VALUE_MAX:
            raise S3Error("InvalidTag", f"A tag's key has 1 to {_KEY_MAX} characters, its value at most {_VALUE_MAX}")
        if key.startswith("aws:"):
            raise S3Error("InvalidTag", "Keys of tags cannot begin with aws:")
    if len(dict(pairs)) < len(pairs):
        raise S3Error("InvalidTag", "Cannot provide multiple Tags with the same key")
    return dict(pairs)
