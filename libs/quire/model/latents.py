"""The stored form of latents: a self-describing record around losslessly compressed values.

A record must be decodable in ten years, from nothing but the record and the VAE's weights: it names the VAE
(repository, revision, digest of the weights, class, configuration), how to decode (dtype, upcasting, tiling), the whole
rule by which latents were normalised and whether that is undone already, the versions of what wrote it, and the digest
of the values. Values are compressed by pcodec, channel by channel (each is smooth in itself).

    "QLAT" | version, u8 | 3 bytes 0 | header length, u32 | CRC-32 of the header, u32 | header, CBOR | channels

Integers are little-endian. Everything is bounded before anything is allocated.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import cbor2
import numpy as np
import numpy.typing as npt

from quire.model.errors import CorruptData, InvalidRequest

Values = npt.NDArray[Any]
_PREFIX: Final = struct.Struct("<4sB3xII")
_MAGIC: Final = b"QLAT"
_VERSION: Final = 1
_CODEC: Final = "pcodec 1, per channel"
HEADER_BYTES_MAX: Final = 1 << 20
CHANNELS_MAX: Final = 4096
ELEMENTS_MAX: Final = 1 << 24
# bfloat16 has no numpy type: its bits are kept as u16.
_KINDS: Final = {"float16": np.float16, "float32": np.float32, "bfloat16": np.uint16}
_BITS: Final = {"float16": np.uint16, "float32": np.uint32, "bfloat16": np.uint16}


_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
_FLOAT32_TINY: Final = float(np.finfo(np.float32).tiny)


class RecordInvalid(InvalidRequest):
    """Bytes that this version cannot read as a latent record."""


@dataclass(frozen=True, slots=True)
class Vae:
    """The decoder that a latent belongs to. `weights_sha256`: digest of its weights (see `quire_decoder`), or empty."""

    repository: str
    revision: str = ""
    weights_sha256: str = ""
    class_name: str = "AutoencoderKL"
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Normalisation:
    """Stored values z; the decoder takes z·std/scaling + mean + shift, unless `undone`: then z itself.

    `mean`, `std` per channel, empty for none. `batch_norm`: statistics of the VAE's weights apply.
    """

    scaling_factor: float = 1.0
    shift_factor: float = 0.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    batch_norm: bool = False
    undone: bool = False


@dataclass(frozen=True, slots=True)
class DecodeRule:
    """How the reference decode is done."""

    dtype: str = "float32"
    force_upcast: bool = False
    tiling: bool = False
    slicing: bool = False


@dataclass(frozen=True, slots=True)
class LatentInfo:
    """Description of the values of a record. `shape` is (channels, height, width).

    `layout`: "chw", or "packed" for FLUX's 2×2 patches, of which `shape` is the unpacked form. `height`, `width` of the
    image; `perceptual_hash` of a reference decode, empty for none. `sha256` is of the values, little-endian, in order.
    """

    shape: tuple[int, int, int]
    dtype: str
    vae: Vae
    height: int
    width: int
    normalisation: Normalisation = field(default_factory=Normalisation)
    decode: DecodeRule = field(default_factory=DecodeRule)
    layout: str = "chw"
    versions: dict[str, str] = field(default_factory=dict)
    perceptual_hash: bytes = b""
    created_ms: int = 0
    codec: str = _CODEC
    sha256: bytes = b""

    def __post_init__(self) -> None:
        check_shape(self.shape, self.dtype)
        if self.layout not in ("chw", "packed"):
            raise RecordInvalid(f"{self.layout!r}; chw or packed", field="layout")
        if not all(_is_whole(side) and 0 < side <= 1 << 16 for side in (self.height, self.width)):
            raise RecordInvalid(f"{self.height} × {self.width} is no image", field="height, width")
        if self.decode.dtype not in _KINDS:
            raise RecordInvalid(f"{self.decode.dtype!r}; there are {', '.join(_KINDS)}", field="decode.dtype")
        if self.shape[1] > self.height or self.shape[2] > self.width:
            raise RecordInvalid(f"{self.height} × {self.width}, but the latent is {self.shape}", field="height, width")
        rule = self.normalisation
        for name in ("scaling_factor", "shift_factor"):
            if not _is_finite(getattr(rule, name)):
                raise RecordInvalid(f"{getattr(rule, name)!r} is no finite number", field=name)
        if abs(rule.scaling_factor) < _FLOAT32_TINY:
            raise RecordInvalid(f"{rule.scaling_factor} cannot be divided by", field="scaling_factor")
        for name in ("mean", "std"):
            if len(getattr(rule, name)) not in (0, self.shape[0]):
                raise RecordInvalid(f"{len(getattr(rule, name))} values for {self.shape[0]} channels", field=name)
            if not all(map(_is_finite, getattr(rule, name))):
                raise RecordInvalid("not all are finite numbers", field=name)
        self._check_types()

    def _check_types(self) -> None:
        """Check the types of the fields: a record comes from anywhere, and they may be of any type."""
        texts = {
            "vae.repository": self.vae.repository,
            "vae.revision": self.vae.revision,
            "vae.weights_sha256": self.vae.weights_sha256,
            "vae.class_name": self.vae.class_name,
            "codec": self.codec,
        }
        for name, value in texts.items():
            if not isinstance(value, str):
                raise RecordInvalid(f"{value!r} is no text", field=name)
        for name in ("sha256", "perceptual_hash"):
            if not isinstance(getattr(self, name), bytes):
                raise RecordInvalid(f"{getattr(self, name)!r} is not of bytes", field=name)
        if not isinstance(self.vae.config, dict) or not isinstance(self.versions, dict):
            raise RecordInvalid("not by name", field="vae.config, versions")

    @property
    def value_bytes(self) -> int:
        """Size of the uncompressed values."""
        return math.prod(self.shape) * np.dtype(_KINDS[self.dtype]).itemsize


def _is_finite(value: object) -> bool:
    """Return whether a value is a finite number as float32, which a decoder computes with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _FLOAT32_MAX


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_shape(shape: tuple[int, ...], dtype: str) -> None:
    """Check the fields. Raises `RecordInvalid` for values that no latent has."""
    if dtype not in _KINDS:
        raise RecordInvalid(f"{dtype!r}; there are {', '.join(_KINDS)}", field="dtype")
    if len(shape) != 3 or not all(_is_whole(size) and size > 0 for size in shape):
        raise RecordInvalid(f"{shape} is not (channels, height, width)", field="shape")
    if shape[0] > CHANNELS_MAX or math.prod(shape) > ELEMENTS_MAX:
        raise RecordInvalid(f"{shape}: at most {CHANNELS_MAX} channels and {ELEMENTS_MAX} values", field="shape")


def encode_record(values: Values, info: LatentInfo) -> bytes:
    """Compress `values` (shape and dtype as `info` says; bfloat16 as u16) into a record. Bit-exact, NaN included."""
    from pcodec import ChunkConfig, standalone

    if values.shape != info.shape or values.dtype != _KINDS[info.dtype]:
        raise RecordInvalid(f"{values.dtype} {values.shape}, the record says {info.dtype} {info.shape}", field="values")
    channels = np.ascontiguousarray(values).reshape(info.shape[0], -1)
    streams = [standalone.simple_compress(channel, ChunkConfig()) for channel in channels]
    header = asdict(replace(info, sha256=digest(values), codec=_CODEC)) | {"sizes": [len(stream) for stream in streams]}
    packed = cbor2.dumps(header, canonical=True)
    if len(packed) > HEADER_BYTES_MAX:
        raise RecordInvalid(f"a header of {len(packed)} bytes, {HEADER_BYTES_MAX} at most", field="vae.config")
    return b"".join((_PREFIX.pack(_MAGIC, _VERSION, len(packed), zlib.crc32(packed)), packed, *streams))


def read_info(record: bytes | memoryview) -> LatentInfo:
    """Return the description in a record, without reading its values. Raises `RecordInvalid`."""
    return _read_header(memoryview(record))[0]


def decode_record(record: bytes | memoryview) -> tuple[Values, LatentInfo]:
    """Return the stored values and their description. Raises `RecordInvalid`, `CorruptData`."""
    from pcodec import standalone

    view = memoryview(record)
    info, sizes, start = _read_header(view)
    if start + sum(sizes) != len(view):
        raise CorruptData(f"the record has {len(view)} bytes, its header says {start + sum(sizes)}")
    values = np.empty((info.shape[0], info.shape[1] * info.shape[2]), dtype=_KINDS[info.dtype])
    for channel, size in zip(values, sizes, strict=True):
        try:
            progress = standalone.simple_decompress_into(bytes(view[start : start + size]), channel)
        except (RuntimeError, TypeError, ValueError) as error:
            raise CorruptData(f"a channel does not decompress: {error}") from None
        if progress.n_processed != len(channel) or not progress.finished:
            raise CorruptData(f"a channel has other than {len(channel)} values")
        start += size
    values = values.reshape(info.shape)
    if digest(values) != info.sha256:
        raise CorruptData("the values do not match their digest")
    return values, info


def digest(values: Values) -> bytes:
    """SHA-256 of the values' bits, little-endian, in order."""
    return hashlib.sha256(np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False).data).digest()


def denormalised(values: Values, info: LatentInfo) -> npt.NDArray[np.float32]:
    """Return the input of the VAE's decoder: the normalisation undone, float32."""
    if info.dtype == "bfloat16":
        latent = (values.astype(np.uint32) << 16).view(np.float32)
    else:
        latent = values.astype(np.float32)
    rule = info.normalisation
    if rule.undone:
        return latent
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite stays so: it is the latent's
        if rule.std:
            latent = latent * np.array(rule.std, dtype=np.float32)[:, None, None]
        latent = latent / np.float32(rule.scaling_factor)
        if rule.mean:
            latent = latent + np.array(rule.mean, dtype=np.float32)[:, None, None]
        return np.asarray(latent + np.float32(rule.shift_factor), dtype=np.float32)


def from_bytes(raw: bytes | memoryview, shape: tuple[int, int, int], dtype: str) -> Values:
    """Raw little-endian values, in order. Raises `RecordInvalid` where the length does not fit the shape."""
    check_shape(shape, dtype)
    expected = math.prod(shape) * np.dtype(_KINDS[dtype]).itemsize
    if len(raw) != expected:
        raise RecordInvalid(f"{len(raw)} bytes, {dtype} {shape} has {expected}", field="body")
    return np.frombuffer(raw, dtype=np.dtype(_KINDS[dtype]).newbyteorder("<")).reshape(shape).astype(_KINDS[dtype])


def from_safetensors(raw: bytes) -> tuple[Values, str]:
    """The one tensor of a safetensors file, and its dtype's name. (1, C, H, W) counts as (C, H, W).

    Raises `RecordInvalid`.
    """
    try:
        (length,) = struct.unpack_from("<Q", raw)
        if length > HEADER_BYTES_MAX:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__", None)
        ((_, entry),) = header.items()
        dtype = {"F16": "float16", "F32": "float32", "BF16": "bfloat16"}[entry["dtype"]]
        shape = tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if not (_is_whole(begin) and _is_whole(end)):
            raise ValueError(f"offsets {begin!r}, {end!r}")
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RecordInvalid(
            f"no safetensors file with one tensor of F16, F32 or BF16: {error!r:.200}", field="body"
        ) from None
    if len(shape) == 4 and shape[0] == 1:
        shape = shape[1:]
    check_shape(shape, dtype)
    if not 0 <= begin <= end <= len(raw) - 8 - length:
        raise RecordInvalid(
            f"its tensor ends at {end}, the file has {len(raw) - 8 - length} bytes of data", field="body"
        )
    return from_bytes(memoryview(raw)[8 + length + begin : 8 + length + end], shape, dtype), dtype


def _read_header(view: memoryview) -> tuple[LatentInfo, list[int], int]:
    """Return the description, the sizes of the channels' streams, and the offset of the first."""
    if len(view) < _PREFIX.size:
        raise RecordInvalid(f"{len(view)} bytes are no latent record", field="record")
    magic, version, length, crc = _PREFIX.unpack_from(view)
    if magic != _MAGIC or version != _VERSION:
        raise RecordInvalid(f"magic {magic!r}, version {version}", field="record")
    if length > HEADER_BYTES_MAX or _PREFIX.size + length > len(view):
        raise CorruptData(f"a header of {length} bytes in a record of {len(view)}")
    packed = view[_PREFIX.size : _PREFIX.size + length]
    if zlib.crc32(packed) != crc:
        raise CorruptData("the record's header does not match its checksum")
    try:
        header = cbor2.loads(bytes(packed))
        sizes = header.pop("sizes")
        rule = header.pop("normalisation")
        normalisation = Normalisation(**(rule | {name: tuple(rule[name]) for name in ("mean", "std")}))
        info = LatentInfo(
            **(header | {"shape": tuple(header["shape"])} | {"vae": Vae(**header["vae"])})
            | {"decode": DecodeRule(**header["decode"]), "normalisation": normalisation}
        )
        if info.codec != _CODEC:
            raise RecordInvalid(f"{info.codec!r}; this version reads {_CODEC!r}", field="codec")
        if len(sizes) != info.shape[0] or not all(_is_whole(size) and size >= 0 for size in sizes):
            raise RecordInvalid(f"{len(sizes)} channels, the shape has {info.shape[0]}", field="sizes")
    except (cbor2.CBORDecodeError, TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
        raise RecordInvalid(f"a header that is not understood: {error!r:.200}", field="record") from None
    return info, sizes, _PREFIX.size + length
