"""Attributes of an object, as GetObjectAttributes answers them."""

from __future__ import annotations

from typing import Any, Final

from quire.model.buckets import StoredObject
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.s3 import xml
from quire_gateway.s3.checksums import kind_of

_ALL: Final = frozenset({"ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize"})


def attributes_document(entry: StoredObject, header: str, limit: int, marker: int) -> bytes:
    """Return the document.

    Args:
        entry: The object.
        header: `x-amz-object-attributes`: names of attributes, separated by commas.
        limit: How many parts at most.
        marker: Number of the part after which they begin.

    Raises:
        S3Error: InvalidArgument for no attribute, or an unknown one.
    """
    names = {name.strip() for name in header.split(",") if name.strip()}
    if not names or names - _ALL:
        raise S3Error("InvalidArgument", f"x-amz-object-attributes has some of {', '.join(sorted(_ALL))}")
    children: list[tuple[str, Any]] = []
    if "ETag" in names:
        children.append(("ETag", entry.etag))
    if "Checksum" in names and entry.checksums:
        checksums = xml.checksum_elements(entry.checksums)
        children.append(("Checksum", [*checksums, ("ChecksumType", kind_of(entry.checksums))]))
    if "ObjectParts" in names and entry.parts:
        children.append(("ObjectParts", _parts(entry, limit, marker)))
    if "StorageClass" in names:
        children.append(("StorageClass", "STANDARD"))
    if "ObjectSize" in names:
        children.append(("ObjectSize", entry.size))
    return xml.document("GetObjectAttributesResponse", children)


def _parts(entry: StoredObject, limit: int, marker: int) -> list[tuple[str, Any]]:
    """Return the elements of the parts; those of an object without checksums are only counted, as AWS has it."""
    children: list[tuple[str, Any]] = [("PartsCount", len(entry.parts))]
    if not any(part.checksums for part in entry.parts):
        return children
    rest = [part for part in entry.parts if part.number > marker]
    page = rest[:limit]
    children += [
        ("PartNumberMarker", marker),
        ("NextPartNumberMarker", page[-1].number if page else marker),
        ("MaxParts", limit),
        ("IsTruncated", str(len(page) < len(rest)).lower()),
    ]
    for part in page:
        about = [("PartNumber", part.number), ("Size", part.size), *xml.checksum_elements(part.checksums)]
        children.append(("Part", about))
    return children
