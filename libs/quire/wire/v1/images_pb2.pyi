from quire.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Fit(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FIT_UNSPECIFIED: _ClassVar[Fit]
    FIT_CONTAIN: _ClassVar[Fit]
    FIT_COVER: _ClassVar[Fit]

class Gravity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAVITY_UNSPECIFIED: _ClassVar[Gravity]
    GRAVITY_CENTER: _ClassVar[Gravity]
    GRAVITY_NORTH: _ClassVar[Gravity]
    GRAVITY_SOUTH: _ClassVar[Gravity]
    GRAVITY_WEST: _ClassVar[Gravity]
    GRAVITY_EAST: _ClassVar[Gravity]
FIT_UNSPECIFIED: Fit
FIT_CONTAIN: Fit
FIT_COVER: Fit
GRAVITY_UNSPECIFIED: Gravity
GRAVITY_CENTER: Gravity
GRAVITY_NORTH: Gravity
GRAVITY_SOUTH: Gravity
GRAVITY_WEST: Gravity
GRAVITY_EAST: Gravity

class ImageEntry(_message.Message):
    __slots__ = ("image_id", "record_sha256", "record_bytes", "latent_sha256", "weights_sha256", "height", "width", "created_ms", "expires_ms", "metadata", "provenance", "record_name")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    IMAGE_ID_FIELD_NUMBER: _ClassVar[int]
    RECORD_SHA256_FIELD_NUMBER: _ClassVar[int]
    RECORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    LATENT_SHA256_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    RECORD_NAME_FIELD_NUMBER: _ClassVar[int]
    image_id: str
    record_sha256: bytes
    record_bytes: int
    latent_sha256: bytes
    weights_sha256: str
    height: int
    width: int
    created_ms: int
    expires_ms: int
    metadata: _containers.ScalarMap[str, str]
    provenance: str
    record_name: bytes
    def __init__(self, image_id: _Optional[str] = ..., record_sha256: _Optional[bytes] = ..., record_bytes: _Optional[int] = ..., latent_sha256: _Optional[bytes] = ..., weights_sha256: _Optional[str] = ..., height: _Optional[int] = ..., width: _Optional[int] = ..., created_ms: _Optional[int] = ..., expires_ms: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ..., provenance: _Optional[str] = ..., record_name: _Optional[bytes] = ...) -> None: ...

class Rendering(_message.Message):
    __slots__ = ("format", "quality", "width", "height", "fit", "gravity", "enlarge")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    QUALITY_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    FIT_FIELD_NUMBER: _ClassVar[int]
    GRAVITY_FIELD_NUMBER: _ClassVar[int]
    ENLARGE_FIELD_NUMBER: _ClassVar[int]
    format: str
    quality: int
    width: int
    height: int
    fit: Fit
    gravity: Gravity
    enlarge: bool
    def __init__(self, format: _Optional[str] = ..., quality: _Optional[int] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., fit: _Optional[_Union[Fit, str]] = ..., gravity: _Optional[_Union[Gravity, str]] = ..., enlarge: _Optional[bool] = ...) -> None: ...

class PutImageRequest(_message.Message):
    __slots__ = ("entry", "tenant", "expected", "ttl_ms")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    entry: ImageEntry
    tenant: str
    expected: ExpectedImage
    ttl_ms: int
    def __init__(self, entry: _Optional[_Union[ImageEntry, _Mapping]] = ..., tenant: _Optional[str] = ..., expected: _Optional[_Union[ExpectedImage, _Mapping]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class ExpectedImage(_message.Message):
    __slots__ = ("absent", "record_sha256")
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    RECORD_SHA256_FIELD_NUMBER: _ClassVar[int]
    absent: bool
    record_sha256: bytes
    def __init__(self, absent: _Optional[bool] = ..., record_sha256: _Optional[bytes] = ...) -> None: ...

class PutImageResponse(_message.Message):
    __slots__ = ("replaced",)
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    replaced: bool
    def __init__(self, replaced: _Optional[bool] = ...) -> None: ...

class PutLatentRequest(_message.Message):
    __slots__ = ("image_id", "source", "record_bytes", "allow_unknown_vae", "ttl_ms", "metadata", "provenance", "durability", "expected")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    IMAGE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    RECORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOW_UNKNOWN_VAE_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    image_id: str
    source: _common_pb2.RdmaTarget
    record_bytes: int
    allow_unknown_vae: bool
    ttl_ms: int
    metadata: _containers.ScalarMap[str, str]
    provenance: str
    durability: _common_pb2.Durability
    expected: ExpectedImage
    def __init__(self, image_id: _Optional[str] = ..., source: _Optional[_Union[_common_pb2.RdmaTarget, _Mapping]] = ..., record_bytes: _Optional[int] = ..., allow_unknown_vae: _Optional[bool] = ..., ttl_ms: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ..., provenance: _Optional[str] = ..., durability: _Optional[_Union[_common_pb2.Durability, str]] = ..., expected: _Optional[_Union[ExpectedImage, _Mapping]] = ...) -> None: ...

class PutLatentResponse(_message.Message):
    __slots__ = ("entry",)
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    entry: ImageEntry
    def __init__(self, entry: _Optional[_Union[ImageEntry, _Mapping]] = ...) -> None: ...

class PutPictureRequest(_message.Message):
    __slots__ = ("image_id", "source", "picture_bytes", "weights_sha256", "background_rgb", "ttl_ms", "metadata", "provenance", "durability")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    IMAGE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PICTURE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_RGB_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    image_id: str
    source: _common_pb2.RdmaTarget
    picture_bytes: int
    weights_sha256: str
    background_rgb: int
    ttl_ms: int
    metadata: _containers.ScalarMap[str, str]
    provenance: str
    durability: _common_pb2.Durability
    def __init__(self, image_id: _Optional[str] = ..., source: _Optional[_Union[_common_pb2.RdmaTarget, _Mapping]] = ..., picture_bytes: _Optional[int] = ..., weights_sha256: _Optional[str] = ..., background_rgb: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ..., provenance: _Optional[str] = ..., durability: _Optional[_Union[_common_pb2.Durability, str]] = ...) -> None: ...

class PutPictureResponse(_message.Message):
    __slots__ = ("entry", "psnr_db", "error_max", "first_of_several")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    PSNR_DB_FIELD_NUMBER: _ClassVar[int]
    ERROR_MAX_FIELD_NUMBER: _ClassVar[int]
    FIRST_OF_SEVERAL_FIELD_NUMBER: _ClassVar[int]
    entry: ImageEntry
    psnr_db: float
    error_max: int
    first_of_several: bool
    def __init__(self, entry: _Optional[_Union[ImageEntry, _Mapping]] = ..., psnr_db: _Optional[float] = ..., error_max: _Optional[int] = ..., first_of_several: _Optional[bool] = ...) -> None: ...

class GetLatentRequest(_message.Message):
    __slots__ = ("image_id", "target")
    IMAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    image_id: str
    target: _common_pb2.RdmaTarget
    def __init__(self, image_id: _Optional[str] = ..., target: _Optional[_Union[_common_pb2.RdmaTarget, _Mapping]] = ...) -> None: ...

class GetLatentResponse(_message.Message):
    __slots__ = ("entry",)
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    entry: ImageEntry
    def __init__(self, entry: _Optional[_Union[ImageEntry, _Mapping]] = ...) -> None: ...

class HeadImageRequest(_message.Message):
    __slots__ = ("image_id", "tenant")
    IMAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    image_id: str
    tenant: str
    def __init__(self, image_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class HeadImageResponse(_message.Message):
    __slots__ = ("entry",)
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    entry: ImageEntry
    def __init__(self, entry: _Optional[_Union[ImageEntry, _Mapping]] = ...) -> None: ...

class DeleteImageRequest(_message.Message):
    __slots__ = ("image_id", "tenant")
    IMAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    image_id: str
    tenant: str
    def __init__(self, image_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class DeleteImageResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: bool
    def __init__(self, deleted: _Optional[bool] = ...) -> None: ...

class ListImagesRequest(_message.Message):
    __slots__ = ("prefix", "after", "limit", "tenant")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    after: str
    limit: int
    tenant: str
    def __init__(self, prefix: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class ListImagesResponse(_message.Message):
    __slots__ = ("entries", "next_after")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_AFTER_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[ImageEntry]
    next_after: str
    def __init__(self, entries: _Optional[_Iterable[_Union[ImageEntry, _Mapping]]] = ..., next_after: _Optional[str] = ...) -> None: ...

class GetImageRequest(_message.Message):
    __slots__ = ("image_id", "rendering", "target", "if_none_match")
    IMAGE_ID_FIELD_NUMBER: _ClassVar[int]
    RENDERING_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    IF_NONE_MATCH_FIELD_NUMBER: _ClassVar[int]
    image_id: str
    rendering: Rendering
    target: _common_pb2.RdmaTarget
    if_none_match: str
    def __init__(self, image_id: _Optional[str] = ..., rendering: _Optional[_Union[Rendering, _Mapping]] = ..., target: _Optional[_Union[_common_pb2.RdmaTarget, _Mapping]] = ..., if_none_match: _Optional[str] = ...) -> None: ...

class GetImageResponse(_message.Message):
    __slots__ = ("entry", "length", "etag", "source", "decoder", "stages_us")
    class StagesUsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DECODER_FIELD_NUMBER: _ClassVar[int]
    STAGES_US_FIELD_NUMBER: _ClassVar[int]
    entry: ImageEntry
    length: int
    etag: str
    source: str
    decoder: str
    stages_us: _containers.ScalarMap[str, int]
    def __init__(self, entry: _Optional[_Union[ImageEntry, _Mapping]] = ..., length: _Optional[int] = ..., etag: _Optional[str] = ..., source: _Optional[str] = ..., decoder: _Optional[str] = ..., stages_us: _Optional[_Mapping[str, int]] = ...) -> None: ...

class LeasedRecord(_message.Message):
    __slots__ = ("lease", "nodes")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    lease: bytes
    nodes: _containers.RepeatedCompositeFieldContainer[_common_pb2.NodeAddress]
    def __init__(self, lease: _Optional[bytes] = ..., nodes: _Optional[_Iterable[_Union[_common_pb2.NodeAddress, _Mapping]]] = ...) -> None: ...

class RouteImageRequest(_message.Message):
    __slots__ = ("entry", "lease_ttl_ms", "failed")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    entry: ImageEntry
    lease_ttl_ms: int
    failed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, entry: _Optional[_Union[ImageEntry, _Mapping]] = ..., lease_ttl_ms: _Optional[int] = ..., failed: _Optional[_Iterable[str]] = ...) -> None: ...

class RouteImageResponse(_message.Message):
    __slots__ = ("ticket", "runner", "runner_address", "owner", "owner_address", "build", "record")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    RUNNER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    OWNER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    runner: str
    runner_address: str
    owner: str
    owner_address: str
    build: str
    record: LeasedRecord
    def __init__(self, ticket: _Optional[int] = ..., runner: _Optional[str] = ..., runner_address: _Optional[str] = ..., owner: _Optional[str] = ..., owner_address: _Optional[str] = ..., build: _Optional[str] = ..., record: _Optional[_Union[LeasedRecord, _Mapping]] = ...) -> None: ...

class FinishImageRequest(_message.Message):
    __slots__ = ("ticket", "failed", "lease")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    failed: bool
    lease: bytes
    def __init__(self, ticket: _Optional[int] = ..., failed: _Optional[bool] = ..., lease: _Optional[bytes] = ...) -> None: ...

class FinishImageResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
