from quire.wire.v1 import common_pb2 as _common_pb2
from quire.wire.v1 import images_pb2 as _images_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeRequest(_message.Message):
    __slots__ = ("entry", "rendering", "target", "owner_address", "record", "tenant", "request_id", "cached_only")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    RENDERING_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    OWNER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_ONLY_FIELD_NUMBER: _ClassVar[int]
    entry: _images_pb2.ImageEntry
    rendering: _images_pb2.Rendering
    target: _common_pb2.RdmaTarget
    owner_address: str
    record: _images_pb2.LeasedRecord
    tenant: str
    request_id: bytes
    cached_only: bool
    def __init__(self, entry: _Optional[_Union[_images_pb2.ImageEntry, _Mapping]] = ..., rendering: _Optional[_Union[_images_pb2.Rendering, _Mapping]] = ..., target: _Optional[_Union[_common_pb2.RdmaTarget, _Mapping]] = ..., owner_address: _Optional[str] = ..., record: _Optional[_Union[_images_pb2.LeasedRecord, _Mapping]] = ..., tenant: _Optional[str] = ..., request_id: _Optional[bytes] = ..., cached_only: _Optional[bool] = ...) -> None: ...

class AbandonRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    def __init__(self, request_id: _Optional[bytes] = ...) -> None: ...

class AbandonResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("length", "source", "build", "stages_us")
    class StagesUsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    STAGES_US_FIELD_NUMBER: _ClassVar[int]
    length: int
    source: str
    build: str
    stages_us: _containers.ScalarMap[str, int]
    def __init__(self, length: _Optional[int] = ..., source: _Optional[str] = ..., build: _Optional[str] = ..., stages_us: _Optional[_Mapping[str, int]] = ...) -> None: ...

class EncodeLatentRequest(_message.Message):
    __slots__ = ("source", "length", "weights_sha256", "target", "background_rgb")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_RGB_FIELD_NUMBER: _ClassVar[int]
    source: _common_pb2.RdmaTarget
    length: int
    weights_sha256: str
    target: _common_pb2.RdmaTarget
    background_rgb: int
    def __init__(self, source: _Optional[_Union[_common_pb2.RdmaTarget, _Mapping]] = ..., length: _Optional[int] = ..., weights_sha256: _Optional[str] = ..., target: _Optional[_Union[_common_pb2.RdmaTarget, _Mapping]] = ..., background_rgb: _Optional[int] = ...) -> None: ...

class EncodeLatentResponse(_message.Message):
    __slots__ = ("record_bytes", "psnr_db", "error_max", "first_of_several")
    RECORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PSNR_DB_FIELD_NUMBER: _ClassVar[int]
    ERROR_MAX_FIELD_NUMBER: _ClassVar[int]
    FIRST_OF_SEVERAL_FIELD_NUMBER: _ClassVar[int]
    record_bytes: int
    psnr_db: float
    error_max: int
    first_of_several: bool
    def __init__(self, record_bytes: _Optional[int] = ..., psnr_db: _Optional[float] = ..., error_max: _Optional[int] = ..., first_of_several: _Optional[bool] = ...) -> None: ...

class ReadCachedRequest(_message.Message):
    __slots__ = ("entry", "target")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    entry: _images_pb2.ImageEntry
    target: _common_pb2.RdmaTarget
    def __init__(self, entry: _Optional[_Union[_images_pb2.ImageEntry, _Mapping]] = ..., target: _Optional[_Union[_common_pb2.RdmaTarget, _Mapping]] = ...) -> None: ...

class ReadCachedResponse(_message.Message):
    __slots__ = ("length", "kind", "build")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    length: int
    kind: str
    build: str
    def __init__(self, length: _Optional[int] = ..., kind: _Optional[str] = ..., build: _Optional[str] = ...) -> None: ...

class WriteBackRequest(_message.Message):
    __slots__ = ("entry", "record", "record_length", "image", "image_length", "stored", "build")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    RECORD_LENGTH_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    entry: _images_pb2.ImageEntry
    record: _common_pb2.RdmaTarget
    record_length: int
    image: _common_pb2.RdmaTarget
    image_length: int
    stored: bool
    build: str
    def __init__(self, entry: _Optional[_Union[_images_pb2.ImageEntry, _Mapping]] = ..., record: _Optional[_Union[_common_pb2.RdmaTarget, _Mapping]] = ..., record_length: _Optional[int] = ..., image: _Optional[_Union[_common_pb2.RdmaTarget, _Mapping]] = ..., image_length: _Optional[int] = ..., stored: _Optional[bool] = ..., build: _Optional[str] = ...) -> None: ...

class WriteBackResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
