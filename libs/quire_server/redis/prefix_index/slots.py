"""Names of the prefix index's keys in Redis. All keys of a bucket have one of 256 hash tags, so one slot."""

from __future__ import annotations

import functools
from typing import Final

from quire.model.fingerprints import PRINT_BYTES

TAGS: Final = [f"{number:02x}".encode() for number in range(256)]


def tag_of(bucket: bytes) -> bytes:
    """The hash tag of a bucket, by its fingerprint."""
    return TAGS[bucket[0] % len(TAGS)]


def tagged(kind: bytes, tag: bytes) -> bytes:
    """Return a key that all buckets of a tag share.

    `l`: how many chunks each node is listed for; `due`: objects to be deleted; `d` and a node's name: its drops.
    """
    return b"quire:%s:{%s}" % (kind, tag)


_TAGGED_BYTES: Final = len(tagged(b"x", TAGS[0]))
PAGES: Final = tagged(b"x", b"*") + b"*"
"""Matches the pages of buckets."""
LINKS: Final = tagged(b"c", b"*") + b"*"
"""Matches the links of buckets."""


def bucket_of_page(key: bytes) -> bytes:
    """The bucket that a page, or a hash of links, belongs to."""
    return key[_TAGGED_BYTES : _TAGGED_BYTES + PRINT_BYTES]


def bucket_key(bucket: bytes) -> bytes:
    """Return the key of the page with a bucket's entries."""
    return _page_key(bucket[0]) + bucket


@functools.cache
def _page_key(first: int) -> bytes:
    return tagged(b"x", tag_of(bytes([first])))


def pins_key(bucket: bytes) -> bytes:
    """Return the key of a bucket's pins."""
    return tagged(b"p", tag_of(bucket)) + bucket


def objects_key(bucket: bytes) -> bytes:
    """Return the key of a bucket's objects that are expected or due for deletion."""
    return tagged(b"o", tag_of(bucket)) + bucket


def bucket_keys(bucket: bytes) -> list[bytes]:
    """Return the keys that scripts which change a bucket may use; they make the names of the others from the first."""
    pages, pins, objects, listings, drops, links, due_objects, hidden_copies = _bucket_keys(tag_of(bucket))
    of_bucket = [pages + bucket, pins + bucket, objects + bucket]
    return [*of_bucket, listings, drops, links + bucket, due_objects, hidden_copies + bucket]


@functools.cache
def _bucket_keys(tag: bytes) -> tuple[bytes, ...]:
    return tuple(tagged(kind, tag) for kind in (b"x", b"p", b"o", b"l", b"d", b"c", b"due", b"h"))


def stores_key(bucket: bytes) -> bytes:
    """Return the key of a bucket's chunks whose store is running."""
    return tagged(b"s", tag_of(bucket)) + bucket


def links_key(bucket: bytes) -> bytes:
    """Return the key of a bucket's links to children in other buckets."""
    return tagged(b"c", tag_of(bucket)) + bucket


def drops_key(node_id: str, tag: bytes) -> bytes:
    """Return the key of a node's drops of all buckets of a tag."""
    return tagged(b"d", tag) + node_id.encode()
