r"""Objects and parts in Redis: "etag\nblob blob ...\nCBOR", whose list begins with the size."""

from __future__ import annotations

import cbor2

from quire.model.buckets import Blob, MultipartUpload, StoredObject, UploadPart


def pack(entry: StoredObject) -> bytes:
    """Pack an object, with ETag and blobs in lines of their own for the scripts."""
    rest = cbor2.dumps(
        [
            entry.size,
            entry.modified_s,
            [blob.size for blob in entry.blobs],
            dict(entry.headers),
            dict(entry.metadata),
            dict(entry.checksums),
        ]
    )
    return f"{entry.etag}\n{' '.join(blob.name for blob in entry.blobs)}\n".encode() + rest


def unpack(key: str, raw: bytes) -> StoredObject:
    """Unpack the object under a key."""
    etag, names, rest = raw.split(b"\n", 2)
    size, modified_s, sizes, headers, metadata, checksums = cbor2.loads(rest)
    blobs = tuple(Blob(name.decode(), length) for name, length in zip(names.split(), sizes, strict=True))
    return StoredObject(
        key,
        etag.decode(),
        size=size,
        modified_s=modified_s,
        blobs=blobs,
        headers=headers,
        metadata=metadata,
        checksums=checksums,
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
    if upload.algorithm:  # the release before reads four fields
        about += [upload.algorithm, upload.full_object]
    return cbor2.dumps(about)


def unpack_upload(upload_id: str, raw: bytes) -> MultipartUpload:
    """Unpack the upload of that id."""
    key, started_s, headers, metadata, *checksum = cbor2.loads(raw)
    return MultipartUpload(key, upload_id, started_s, headers, metadata, *checksum)
