"""S3's XML: bodies in, bounded and without entities; answers out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote
from xml.etree.ElementTree import ParseError
from xml.sax.saxutils import escape

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring

from quire_gateway.core.s3_errors import S3Error

NAMESPACE: Final = "http://s3.amazonaws.com/doc/2006-03-01/"
DELETE_KEYS_MAX: Final = 1000
PARTS_MAX: Final = 10_000
_ALL_USERS: Final = "http://acs.amazonaws.com/groups/global/AllUsers"
_CHECKSUM: Final = "Checksum"
_CONTROL: Final = re.compile(rb"&#(?:x0*([0-9a-fA-F]{1,2})|0*([0-9]{1,2}));|([\x00-\x08\x0b\x0c\x0e-\x1f])")
_OF_DELETE: Final = ("VersionId", "ETag", "LastModifiedTime", "Size")
Tree = str | list[tuple[str, Any]]


def document(name: str, children: Sequence[tuple[str, Any]], namespace: str = NAMESPACE) -> bytes:
    """`children`: (name, text) or (name, children)."""
    attribute = f' xmlns="{namespace}"' if namespace else ""
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}{attribute}>{_inner(children)}</{name}>'.encode(
        errors="replace"
    )


def _inner(children: Iterable[tuple[str, Any]]) -> str:
    parts = []
    for name, value in children:
        inner = _inner(value) if isinstance(value, list) else _legal(str(value))
        parts.append(f"<{name}>{inner}</{name}>")
    return "".join(parts)


def _legal(text: str) -> str:
    """XML 1.0 has no control characters but tab, line feed and return; those go as S3 writes them, but for NUL."""
    text = text.replace("\0", "\ufffd")
    return "".join(c if c >= " " or c in "\t\n" else f"&#{ord(c)};" for c in escape(text, {"\r": "&#13;"}))


def stamp(seconds: float) -> str:
    """ISO 8601 with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def encoded(text: str, encoding_type: str) -> str:
    """A key as a listing shows it: percent-encoded if the client asked for `encoding-type=url`."""
    return quote(text, safe="/-_.~*") if encoding_type == "url" else text


def access_policy(tenant: str, *, public: bool = False) -> bytes:
    """The AccessControlPolicy of the canned ACL `private`: all of it is the owner's; `public`: of `public-read`."""
    owner = [("ID", tenant), ("DisplayName", tenant)]
    grants = [("Grant", [("Grantee", owner), ("Permission", "FULL_CONTROL")])]
    if public:
        grants.append(("Grant", [("Grantee", [("URI", _ALL_USERS)]), ("Permission", "READ")]))
    raw = document("AccessControlPolicy", [("Owner", owner), ("AccessControlList", grants)])
    for kind, first in (("CanonicalUser", b"<ID>"), ("Group", b"<URI>")):
        typed = f'<Grantee xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xsi:type="{kind}">'.encode()
        raw = raw.replace(b"<Grantee>" + first, typed + first)
    return raw


def error_document(error: S3Error, resource: str, request_id: str) -> bytes:
    """Return S3's answer for an error."""
    children = [("Code", error.code), ("Message", error.message), *error.details.items()]
    return document("Error", [*children, ("Resource", resource), ("RequestId", request_id)], namespace="")


def _parsed(body: bytes, name: str) -> Any:
    try:
        root = fromstring(body, forbid_dtd=True)
    except (ParseError, DefusedXmlException, ValueError, LookupError):
        raise S3Error("MalformedXML", "The XML you provided was not well-formed") from None
    if _local(root.tag) != name:
        raise S3Error("MalformedXML", f"The XML you provided is no {name}")
    return root


def _local(tag: Any) -> str:
    return str(tag).rpartition("}")[2]


def _children(element: Any, name: str) -> list[Any]:
    return [child for child in element if _local(child.tag) == name]


def _text(element: Any, name: str) -> str | None:
    elements = _children(element, name)
    return (elements[0].text or "") if elements else None


def read_tree(body: bytes, name: str, schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Read a document into the form that `document` takes.

    Args:
        body: The document.
        name: Of its root.
        schema: By name of an element, the schema of its children, or None for text.

    Raises:
        S3Error: MalformedXML; NotImplemented for an element that is not in the schema.
    """
    return _tree(_parsed(body, name), schema)


def _tree(element: Any, schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
    children: list[tuple[str, Any]] = []
    for child in element:
        name = _local(child.tag)
        if name not in schema:
            raise S3Error("NotImplemented", f"{_local(element.tag)} with {name} is not implemented here")
        inner = schema[name]
        if inner is None and len(child):
            raise S3Error("MalformedXML", f"{name} is text")
        children.append((name, (child.text or "") if inner is None else _tree(child, inner)))
    return children


def texts(tree: Sequence[tuple[str, Any]], name: str) -> list[str]:
    """Return the texts of the children of that name."""
    return [str(value) for child, value in tree if child == name]


def trees(tree: Sequence[tuple[str, Any]], name: str) -> list[list[tuple[str, Any]]]:
    """Return the children of that name."""
    return [value for child, value in tree if child == name]


@dataclass(frozen=True, slots=True)
class ToDelete:
    """An object of a DeleteObjects request; its version and its conditions are "" where it has none."""

    key: str
    version_id: str
    etag: str
    modified: str
    size: str


def read_delete(body: bytes) -> tuple[list[ToDelete], bool]:
    """Read a DeleteObjects request: what to delete, and whether it is quiet. Raises `S3Error`."""
    nonce = os.urandom(8).hex()
    try:
        root = _parsed(body, "Delete")
    except S3Error:
        root = _parsed(_CONTROL.sub(lambda match: _placeholder(match, nonce), body), "Delete")
    keys = []
    for child in _children(root, "Object"):
        key = _text(child, "Key")
        if not key:
            raise S3Error("MalformedXML", "An Object has no Key")
        if foreign := sorted({_local(element.tag) for element in child} - {"Key", *_OF_DELETE}):
            raise S3Error("NotImplemented", f"An Object with {foreign[0]} is not implemented here")
        key = re.sub(f"{nonce}([0-9a-f]{{2}})", lambda code: chr(int(code[1], 16)), key)
        keys.append(ToDelete(key, *((_text(child, name) or "").strip() for name in _OF_DELETE)))
    if not 0 < len(keys) <= DELETE_KEYS_MAX:
        raise S3Error("MalformedXML", f"{len(keys)} keys; 1 to {DELETE_KEYS_MAX} can be deleted at a time")
    return keys, (_text(root, "Quiet") or "").lower() == "true"


def _placeholder(match: re.Match[bytes], nonce: str) -> bytes:
    """Stand in for a control character: S3's keys have them, XML 1.0 has not, and no parser lets them pass."""
    hexadecimal, decimal, raw = match.groups()
    code = int(hexadecimal, 16) if hexadecimal else int(decimal) if decimal else raw[0]
    return f"{nonce}{code:02x}".encode() if code < ord(" ") and chr(code) not in "\t\n\r" else match[0]


def read_complete(body: bytes) -> tuple[list[tuple[int, str]], dict[int, dict[str, str]]]:
    """Numbers and ETags of a CompleteMultipartUpload request; and checksums of parts, by number and algorithm.

    Raises `S3Error`.
    """
    root = _parsed(body, "CompleteMultipartUpload")
    parts: list[tuple[int, str]] = []
    checksums: dict[int, dict[str, str]] = {}
    for child in _children(root, "Part"):
        number, etag = _text(child, "PartNumber") or "", _text(child, "ETag")
        if not (number.isascii() and number.isdigit() and len(number) < 10) or etag is None:
            raise S3Error("MalformedXML", "A Part has no PartNumber or no ETag")
        parts.append((int(number), etag.strip().strip('"')))
        for element in child:
            name = _local(element.tag)
            if name.startswith(_CHECKSUM) and (value := (element.text or "").strip()):
                checksums.setdefault(int(number), {})[name.removeprefix(_CHECKSUM).lower()] = value
    if not 0 < len(parts) <= PARTS_MAX:
        raise S3Error("MalformedXML", "You must specify at least one part, and 10,000 at most")
    return parts, checksums


def checksum_elements(checksums: Mapping[str, str]) -> list[tuple[str, Any]]:
    """Return the elements of checksums by algorithm."""
    return [(f"{_CHECKSUM}{name.upper()}", value) for name, value in checksums.items()]


def check_create(body: bytes) -> None:
    """A CreateBucketConfiguration; any location is this one. Raises `S3Error`."""
    if body.strip():
        _parsed(body, "CreateBucketConfiguration")
