"""Images that live as latents: metadata, the place of the record, and renderings."""

from __future__ import annotations

import hashlib
import hmac
import re
import unicodedata
from dataclasses import dataclass
from typing import Final

from quire.model.choices import choice
from quire.model.errors import CorruptData, InvalidRequest
from quire.model.fitting import Fit, Gravity
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.latents import LatentInfo, RecordInvalid, Values, decode_record
from quire.model.layout import Attention, Dtype, KvLayout
from quire.model.nodes import NodeAddress
from quire.model.provenance import checked_provenance

_ID_BYTES_MAX: Final = 512
_UNIT_BYTES: Final = 4096
RECORD_BYTES_MAX: Final = 32 << 20
_FORMATS: Final = {"jpg": "jpeg"}
"""Other names of formats."""
MEDIA_TYPES: Final = {
    "png": "image/png",
    "webp": "image/webp",
    "jpeg": "image/jpeg",
    "avif": "image/avif",
}
WIDTH_MAX: Final = 8192
TTL_MS_MAX: Final = 10 * 365 * 86_400_000
_METADATA_BYTES_MAX: Final = 2048
_METADATA_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_QUALITY: Final = {"jpeg": 90, "avif": 90}
"""Of formats that are not lossless here."""
PIXELS_MAX: Final = 1 << 26
_MANIFEST_BYTES_MAX: Final = 64 << 10
"""Of a signed manifest: its certificates, and what it says."""


@dataclass(frozen=True, slots=True)
class ImageEntry:
    """An image in the catalogue. `record_sha256`, `record_bytes`: digest and length of its latent record.

    `record_name`: the record's name in the chunk store, 32 bytes (see `record_name`). Clients do not receive it; their
    entries have the digest in its place. `latent_sha256` is of the values, `weights_sha256` of the VAE that they belong
    to, empty for unknown. `created_ms`, `expires_ms`: since the Unix epoch; 0 for never. `metadata`: set by its owner,
    by name. `provenance`: content of a signed manifest in every image that is served (`quire.model.provenance`).
    """

    image_id: str
    record_sha256: bytes
    record_bytes: int
    latent_sha256: bytes
    weights_sha256: str
    height: int
    width: int
    created_ms: int = 0
    expires_ms: int = 0
    metadata: tuple[tuple[str, str], ...] = ()
    provenance: str = ""
    record_name: bytes = b""

    def __post_init__(self) -> None:
        check_image_id(self.image_id)
        if not self.record_name:
            object.__setattr__(self, "record_name", self.record_sha256)
        if {len(self.record_sha256), len(self.latent_sha256), len(self.record_name)} != {32}:
            raise InvalidRequest("digests have 32 bytes", field="record_sha256, latent_sha256, record_name")
        if not 0 < self.record_bytes <= RECORD_BYTES_MAX:
            raise InvalidRequest(f"{self.record_bytes} bytes, {RECORD_BYTES_MAX} at most", field="record_bytes")
        if not (0 < self.height <= 1 << 16 and 0 < self.width <= 1 << 16):
            raise InvalidRequest(f"{self.height} × {self.width}", field="height, width")

    @property
    def namespace(self) -> Namespace:
        """Namespace of the record's chunk."""
        return record_namespace(self.record_bytes)

    @property
    def version(self) -> str:
        """Version of the served image: it differs with the record and with the provenance."""
        if not self.provenance:
            return self.record_sha256.hex()[:16]
        return hashlib.sha256(self.record_sha256 + self.provenance.encode()).hexdigest()[:16]

    def is_over(self, now_ms: int) -> bool:
        """Whether its time is up."""
        return 0 < self.expires_ms <= now_ms

    @property
    def keys(self) -> ChunkKeys:
        """The one key of its record: by content, so that equal records of a tenant are stored once."""
        return record_keys(self.record_name)


@dataclass(frozen=True, slots=True)
class ExpectedImage:
    """The entry that an id must have when it is put: none, or an image with that record; else anything."""

    absent: bool = False
    record_sha256: bytes = b""


@dataclass(frozen=True, slots=True)
class ImageAttributes:
    """Details of a new image: its time to live (0 for ever), metadata and provenance.

    Metadata are names of small letters, digits and hyphens with printable values, 2 KiB in all; provenance is as in
    `checked_provenance`. Raises `InvalidRequest`.
    """

    ttl_ms: int = 0
    metadata: tuple[tuple[str, str], ...] = ()
    provenance: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.ttl_ms <= TTL_MS_MAX:
            raise InvalidRequest(f"{self.ttl_ms} ms, ten years at most", field="ttl")
        for name, value in self.metadata:
            if not _METADATA_NAME.fullmatch(name) or not value.isprintable():
                raise InvalidRequest(f"{name[:80]!r}: small letters, digits, hyphens; printable", field="metadata")
        object.__setattr__(self, "provenance", checked_provenance(self.provenance))
        size = sum(len(name) + len(value.encode()) for name, value in self.metadata)
        if size > _METADATA_BYTES_MAX or len(dict(self.metadata)) < len(self.metadata):
            raise InvalidRequest(f"{size} bytes, {_METADATA_BYTES_MAX} at most; each name once", field="metadata")


NO_ATTRIBUTES: Final = ImageAttributes()
"""An image that stays for ever, and of which nothing is said."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Scale to `scaled_height` × `scaled_width`, then keep `height` × `width` from (`top`, `left`). In pixels."""

    scaled_height: int
    scaled_width: int
    top: int
    left: int
    height: int
    width: int

    def keeps(self, height: int, width: int) -> bool:
        """Return whether an image of that size stays unchanged."""
        return self == Geometry(height, width, 0, 0, height, width)


@dataclass(frozen=True, slots=True)
class Rendering:
    """How an image is wanted.

    Quality from 1 to 100; 0: lossless where it can be, else 90. Width and height in pixels; 0: as the other one says,
    or its own. It is not enlarged unless `enlarge`. Fit and gravity may be strings, as "cover".
    """

    format: str = "png"
    quality: int = 0
    width: int = 0
    height: int = 0
    fit: Fit = Fit.CONTAIN
    gravity: Gravity = Gravity.CENTER
    enlarge: bool = False

    def __post_init__(self) -> None:
        name = str(self.format).lower()
        object.__setattr__(self, "format", _FORMATS.get(name, name))
        object.__setattr__(self, "fit", choice(Fit, self.fit, "fit"))
        object.__setattr__(self, "gravity", choice(Gravity, self.gravity, "gravity"))
        if self.format not in MEDIA_TYPES:
            raise InvalidRequest(f"{self.format!r}; there are {', '.join(MEDIA_TYPES)}", field="format")
        if not 0 <= self.quality <= 100:
            raise InvalidRequest(f"{self.quality} is not in 0..100", field="quality")
        for name, size in (("width", self.width), ("height", self.height)):
            if not 0 <= size <= WIDTH_MAX:
                raise InvalidRequest(f"{size} is not in 0..{WIDTH_MAX}", field=name)

    @property
    def media_type(self) -> str:
        """Name for HTTP's Content-Type."""
        return MEDIA_TYPES[self.format]

    def size(self, entry: ImageEntry) -> tuple[int, int]:
        """(height, width) in pixels. Raises `InvalidRequest` for too many."""
        if (pixels := self.pixels(entry)) > PIXELS_MAX:
            raise InvalidRequest(f"{pixels} pixels, {PIXELS_MAX} at most", field="width, height")
        shape = self.geometry(entry.height, entry.width)
        return shape.height, shape.width

    def pixels(self, entry: ImageEntry) -> int:
        """The most that there are at any moment while it is made."""
        shape = self.geometry(entry.height, entry.width)
        return max(shape.scaled_height * shape.scaled_width, entry.height * entry.width)

    def geometry(self, height: int, width: int) -> Geometry:
        """Return the geometry for an image of that size."""
        scales = [ratio for ratio in (self.width and self.width / width, self.height and self.height / height) if ratio]
        if not scales:
            return Geometry(height, width, 0, 0, height, width)
        crops = self.fit is Fit.COVER and len(scales) == 2
        scale = max(scales) if crops else min(scales)
        shrunk = max(1.0, scale) if not self.enlarge else 1.0  # a box that is too large gets smaller, in its shape
        tall, wide = (max(1, round(side * scale / shrunk)) for side in (height, width))
        if not crops:
            return Geometry(tall, wide, 0, 0, tall, wide)
        kept_tall = min(tall, max(1, round(self.height / shrunk)))
        kept_wide = min(wide, max(1, round(self.width / shrunk)))
        top = _offset(tall - kept_tall, self.gravity, Gravity.NORTH, Gravity.SOUTH)
        offset = _offset(wide - kept_wide, self.gravity, Gravity.WEST, Gravity.EAST)
        return Geometry(tall, wide, top, offset, kept_tall, kept_wide)

    def is_original(self, entry: ImageEntry) -> bool:
        """Whether it is the lossless image that a decoder keeps."""
        return self.format == "png" and self.geometry(entry.height, entry.width).keeps(entry.height, entry.width)

    @property
    def encoded_quality(self) -> int:
        """Quality setting of the encoder; 0 for lossless."""
        return 0 if self.format == "png" else self.quality or _QUALITY.get(self.format, 0)

    def bytes_max(self, entry: ImageEntry) -> int:
        """Return an upper bound of every encoding: the pixels, and room for headers and incompressible rows."""
        height, width = self.size(entry)
        manifest = _MANIFEST_BYTES_MAX if entry.provenance else 0
        return (6 if self.format == "avif" else 4) * height * width + (64 << 10) + manifest

    def etag(self, entry: ImageEntry, decoder_build: str) -> str:
        """The record (values, VAE, rules), what decoded it, and how it was encoded. The same bytes have one.

        Strong; but weak with provenance: bytes of a signature differ each time.
        """
        hashed = (entry.provenance,) if entry.provenance else ()
        parts = (entry.record_sha256.hex(), decoder_build, *self._encoding(entry), *hashed)
        weak = "W/" if entry.provenance else ""
        return f'{weak}"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"'

    def variant(self, entry: ImageEntry) -> str:
        """Names the rendition among those of its image; "" for the lossless image as decoders keep it."""
        if self.is_original(entry):
            return ""
        return hashlib.sha256(repr(self._encoding(entry)).encode()).hexdigest()[:16]

    def _encoding(self, entry: ImageEntry) -> tuple[str, int, Geometry]:
        """Everything besides the pixels that its bytes depend on."""
        return self.format, self.encoded_quality, self.geometry(entry.height, entry.width)


def _offset(room: int, gravity: Gravity, first: Gravity, last: Gravity) -> int:
    return 0 if gravity is first else room if gravity is last else room // 2


def check_image_id(image_id: str) -> None:
    """1 to 512 bytes of UTF-8, such as `cats/tom.1` or `猫`: a part of a URL's path. Raises `InvalidRequest`.

    Normal form C, so that ids that look alike are equal; no control characters, and no part between slashes that is
    empty, `.` or `..`, which clients and proxies take out of paths.
    """
    try:
        size = len(image_id.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{image_id[:80]!r} is not Unicode", field="id") from None
    if not 0 < size <= _ID_BYTES_MAX:
        raise InvalidRequest(f"{size} bytes, 1 to {_ID_BYTES_MAX} of UTF-8", field="id")
    if not unicodedata.is_normalized("NFC", image_id):
        raise InvalidRequest(f"{image_id[:80]!r} is not in Unicode's normal form C", field="id")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in image_id):
        raise InvalidRequest(f"{image_id[:80]!r} has control characters", field="id")
    if any(part in ("", ".", "..") for part in image_id.split("/")):
        raise InvalidRequest(f"{image_id[:80]!r} has an empty part, or '.' or '..', between slashes", field="id")


def record_name(secret: bytes, tenant: str, record_sha256: bytes) -> bytes:
    """Compute the name of a tenant's latent record in the chunk store, 32 bytes, under the cluster's secret.

    Another tenant with an equal record cannot find, keep, evict or store this one. Without a tenant the name is the
    digest.
    """
    if not tenant:
        return record_sha256
    return hmac.digest(secret, b"quire image record\0" + tenant.encode() + b"\0" + record_sha256, "sha256")


def record_keys(name: bytes) -> ChunkKeys:
    """Compute the key of the chunk that holds the record of this name."""
    return ChunkKeys(hashlib.sha256(b"quire image record" + name).digest())


def record_namespace(record_bytes: int) -> Namespace:
    """Return the namespace for records of about that length: one layout per quarter of an octave."""
    units = max(1, -(-record_bytes // _UNIT_BYTES))
    if units > 4:
        step = 1 << max(0, (units - 1).bit_length() - 3)
        units = -(-units // step) * step
    layout = KvLayout(1, units, 1, _UNIT_BYTES, Dtype.FP8_E4M3, Attention.MLA)
    return Namespace("quire-images", "1", layout)


def check_record(record: bytes, entry: ImageEntry) -> None:
    """Compare a received record with its entry. Blocks. Raises `CorruptData` if the digest differs."""
    if hashlib.sha256(record).digest() != entry.record_sha256:
        raise CorruptData(f"the bytes received as the record of {entry.image_id!r} have another digest")


@dataclass(frozen=True, slots=True)
class LeasedRecord:
    """The token of a lease on an image's record, empty if it is not stored or was not asked for; and where it lies."""

    lease: bytes = b""
    nodes: tuple[NodeAddress, ...] = ()


def entry_of_record(image_id: str, record: bytes) -> tuple[ImageEntry, Values, LatentInfo]:
    """Return the catalogue's entry for an image with this record, its values, and their description in the record.

    Blocks.

    Raises `InvalidRequest`, `RecordInvalid`.
    """
    check_image_id(image_id)
    if len(record) > RECORD_BYTES_MAX:
        raise InvalidRequest(f"{len(record)} bytes, {RECORD_BYTES_MAX} at most", field="record")
    try:
        values, info = decode_record(record)
    except CorruptData as error:
        raise RecordInvalid(error.message, field="record") from None
    digest = hashlib.sha256(record).digest()
    weights = info.vae.weights_sha256.lower()
    entry = ImageEntry(
        image_id,
        digest,
        record_bytes=len(record),
        latent_sha256=info.sha256,
        weights_sha256=weights,
        height=info.height,
        width=info.width,
    )
    return entry, values, info
