from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AdmitRequest(_message.Message):
    __slots__ = ("delivery", "link", "bytes_per_layer", "compute_window_us", "layers_left", "tenant", "weight", "cap_bytes_per_s", "held_bytes_per_s", "priority")
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_LAYER_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_WINDOW_US_FIELD_NUMBER: _ClassVar[int]
    LAYERS_LEFT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CAP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    delivery: str
    link: str
    bytes_per_layer: int
    compute_window_us: int
    layers_left: int
    tenant: str
    weight: float
    cap_bytes_per_s: int
    held_bytes_per_s: int
    priority: int
    def __init__(self, delivery: _Optional[str] = ..., link: _Optional[str] = ..., bytes_per_layer: _Optional[int] = ..., compute_window_us: _Optional[int] = ..., layers_left: _Optional[int] = ..., tenant: _Optional[str] = ..., weight: _Optional[float] = ..., cap_bytes_per_s: _Optional[int] = ..., held_bytes_per_s: _Optional[int] = ..., priority: _Optional[int] = ...) -> None: ...

class AdmitResponse(_message.Message):
    __slots__ = ("grant",)
    GRANT_FIELD_NUMBER: _ClassVar[int]
    grant: Grant
    def __init__(self, grant: _Optional[_Union[Grant, _Mapping]] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("delivery", "rate_bytes_per_s", "epoch", "epoch_left_ms", "credit_bytes_per_s", "short")
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    RATE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EPOCH_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    SHORT_FIELD_NUMBER: _ClassVar[int]
    delivery: str
    rate_bytes_per_s: int
    epoch: int
    epoch_left_ms: int
    credit_bytes_per_s: int
    short: bool
    def __init__(self, delivery: _Optional[str] = ..., rate_bytes_per_s: _Optional[int] = ..., epoch: _Optional[int] = ..., epoch_left_ms: _Optional[int] = ..., credit_bytes_per_s: _Optional[int] = ..., short: _Optional[bool] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("deliveries",)
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    deliveries: _containers.RepeatedCompositeFieldContainer[Progress]
    def __init__(self, deliveries: _Optional[_Iterable[_Union[Progress, _Mapping]]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("delivery", "layers_left")
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    LAYERS_LEFT_FIELD_NUMBER: _ClassVar[int]
    delivery: str
    layers_left: int
    def __init__(self, delivery: _Optional[str] = ..., layers_left: _Optional[int] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("grants",)
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    grants: _containers.RepeatedCompositeFieldContainer[Grant]
    def __init__(self, grants: _Optional[_Iterable[_Union[Grant, _Mapping]]] = ...) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("delivery",)
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    delivery: str
    def __init__(self, delivery: _Optional[str] = ...) -> None: ...

class FinishResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ObserveRequest(_message.Message):
    __slots__ = ("link", "tenant", "bytes_per_layer", "compute_window_us", "layers", "rate_bytes_per_s", "stall_us")
    LINK_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_LAYER_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_WINDOW_US_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    RATE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    STALL_US_FIELD_NUMBER: _ClassVar[int]
    link: str
    tenant: str
    bytes_per_layer: int
    compute_window_us: int
    layers: int
    rate_bytes_per_s: int
    stall_us: int
    def __init__(self, link: _Optional[str] = ..., tenant: _Optional[str] = ..., bytes_per_layer: _Optional[int] = ..., compute_window_us: _Optional[int] = ..., layers: _Optional[int] = ..., rate_bytes_per_s: _Optional[int] = ..., stall_us: _Optional[int] = ...) -> None: ...

class ObserveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
