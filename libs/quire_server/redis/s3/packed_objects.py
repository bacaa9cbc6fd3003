r"""Objects and parts in Redis: "etag\nblob blob ...\nCBOR", whose list begins with the size.

Behind the ETag of an object that was written with versioning are the order and the id of its version, as
`s3_versions.lua` puts them there.
"""

from __future__ import annotations

from typing import NamedTuple

import cbor2

from quire.model.buckets import NULL_VERSION, Blob, MultipartUpload, ObjectPart, StoredObject, UploadPart

_OLDEST = "f" * 13


class Place(NamedTuple):
    """Place of a version among those of its object: newer ones have a lower order."""

    order: str
    id: str


def place_of(raw: bytes) -> Place:
    """Return the place of a packed object; before versioning it is the oldest, "null"."""
    order, _, version_id = raw.partition(b"\n")[0].decode().partition(" ")[2].partition(" ")
    return Place(order or _OLDEST, version_id or NULL_VERSION)


def with_place_of(raw: bytes, packed: bytes) -> bytes:
    """Return a newly packed object with the place of another."""
    _, space, place = raw.partition(b"\n")[0].partition(b" ")
    etag, line, rest = packed.partition(b"\n")
    return etag + space + place + line + rest


def pack(entry: StoredObject) -> bytes:
    """Pack an object, with ETag and blobs in lines of their own for the scripts; its version is theirs to add."""
    about: list[object] = [
        entry.size,
        entry.modified_s,
        [blob.size for blob in entry.blobs],
        dict(entry.headers),
        dict(entry.metadata),
        dict(entry.checksums),
    ]
    if entry.tags or entry.parts:  # the release before reads six fields
        about += [dict(entry.tags), [[part.number, part.size, dict(part.checksums)] for part in entry.parts]]
    return f"{entry.etag}\n{' '.join(blob.name for blob in entry.blobs)}\n".encode() + cbor2.dumps(about)


def unpack(key: str, raw: bytes) -> StoredObject:
    """Unpack the object under a key."""
    first, names, rest = raw.split(b"\n", 2)
    etag, _, version = first.decode().partition(" ")
    version_id = version.partition(" ")[2]
    size, modified_s, sizes, headers, metadata, checksums, *extension = cbor2.loads(rest)
    tags, parts = extension or ({}, [])
    blobs = tuple(Blob(name.decode(), length) for name, length in zip(names.split(), sizes, strict=True))
    return StoredObject(
        key,
        etag,
        size=size,
        modified_s=modified_s,
        blobs=blobs,
        headers=headers,
        metadata=metadata,
        checksums=checksums,
        tags=tags,
        parts=tuple(ObjectPart(*part) for part in parts),
        version_id="" if version_id == NULL_VERSION else version_id,
    )


def pack_part(part: UploadPart) -> bytes:
    """Pack a part as `pack` does an object."""
    about: list[object] = [part.size, part.modified_s, [blob.size for blob in part.blobs]]
    if part.checksums:  # the release before reads three fields
        about.append(dict(part.checksums))
    rest = cbor2.dumps(about)
    return f"{part.etag}\n{' '.join(blob.name for blob in part.blobs)}\n".encode() + rest


def unpack_part(number: int, raw: bytes) -> UploadPart:
    """Unpack the part of that number."""
    etag, names, rest = raw.split(b"\n", 2)
    size, modified_s, sizes, *checksums = cbor2.loads(rest)
    blobs = tuple(Blob(name.decode(), length) for name, length in zip(names.split(), sizes, strict=True))
    return UploadPart(number, etag.decode(), size, modified_s, blobs, *checksums)


def pack_upload(upload: MultipartUpload) -> bytes:
    """Pack an upload, without its id."""
    about: list[object] = [upload.key, upload.started_s, dict(upload.headers), dict(upload.metadata)]
    if upload.algorithm or upload.tags:  # the release before reads six fields, the one before that four
        about += [upload.algorithm, upload.full_object]
    if upload.tags:
        about.append(dict(upload.tags))
    return cbor2.dumps(about)


def unpack_upload(upload_id: str, raw: bytes) -> MultipartUpload:
    """Unpack the upload of that id."""
    key, started_s, headers, metadata, *extension = cbor2.loads(raw)
    return MultipartUpload(key, upload_id, started_s, headers, metadata, *extension)
