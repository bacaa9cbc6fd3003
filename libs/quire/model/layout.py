"""Arithmetic of the chunk object, KV_L2TD: layer-major; in a layer K then V, then token, then hidden dimension.

A chunk of G tokens has L slices of S = 2·G·n_kv·d·p bytes (ObjectCache, §3.3); with multi-head latent attention there
is one latent vector and one rotary key per token instead of K and V, so S = G·d·p. Slice l is the range [l·S, (l+1)·S).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from quire.model.choices import choice
from quire.model.errors import LayoutInvalid

_LAYERS_MAX: Final = 1024
_TOKENS_MAX: Final = 8192
_HEADS_MAX: Final = 1024
_DIM_MAX: Final = 16384
SLICE_BYTES_MAX: Final = 256 << 20


class Attention(Enum):
    """How attention keeps its state."""

    KV_HEADS = "kv_heads"
    MLA = "mla"


class Dtype(Enum):
    """Element type; the value is (name, bytes per element)."""

    FP32 = ("fp32", 4)
    FP16 = ("fp16", 2)
    BF16 = ("bf16", 2)
    FP8_E4M3 = ("fp8_e4m3", 1)
    FP8_E5M2 = ("fp8_e5m2", 1)

    @property
    def bytes(self) -> int:
        """Bytes of one element."""
        return self.value[1]


_ALIASES: Final = {
    "float32": Dtype.FP32,
    "float16": Dtype.FP16,
    "bfloat16": Dtype.BF16,
    "float8_e4m3fn": Dtype.FP8_E4M3,
    "float8_e5m2": Dtype.FP8_E5M2,
}
"""Names that numpy and torch have."""


def dtype_of(value: Any) -> Dtype:
    """Return the element type that a member, a name, a torch dtype or a numpy dtype means.

    >>> dtype_of("float16"), dtype_of("bf16")
    (<Dtype.FP16: ('fp16', 2)>, <Dtype.BF16: ('bf16', 2)>)

    Raises:
        LayoutInvalid: It means none of them.
    """
    if isinstance(value, Dtype):
        return value
    name = getattr(value, "name", None) or getattr(value, "__name__", None) or str(value)  # of numpy, of its classes
    alias = _ALIASES.get(str(name).removeprefix("torch."))
    return alias or choice(Dtype, value, "layout.dtype", LayoutInvalid)


def _whole(value: Any, name: str) -> int:
    """Return a number that is a whole one by its type. Raises `LayoutInvalid`."""
    try:
        return operator.index(value)
    except TypeError:
        raise LayoutInvalid(f"{value!r}; a whole number is wanted", field=f"layout.{name}") from None


@dataclass(frozen=True, slots=True, init=False)
class KvLayout:
    """Shape of one chunk. Raises `LayoutInvalid`, naming the field, for what no model has.

    `num_layers` L, `chunk_tokens` G, `kv_heads` n_kv (1 for MLA), `head_dim` d (MLA: latent and rotary together).

    >>> layout = KvLayout(num_layers=32, chunk_tokens=16, kv_heads=8, head_dim=128, dtype="bf16")
    >>> layout.slice_bytes, layout.payload_bytes(chunks=2)
    (65536, 4194304)
    """

    num_layers: int
    chunk_tokens: int
    kv_heads: int
    head_dim: int
    dtype: Dtype
    attention: Attention = Attention.KV_HEADS

    def __init__(
        self,
        num_layers: int,
        chunk_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: Dtype | str,
        attention: Attention | str = Attention.KV_HEADS,
    ) -> None:
        put = object.__setattr__
        put(self, "num_layers", _whole(num_layers, "num_layers"))
        put(self, "chunk_tokens", _whole(chunk_tokens, "chunk_tokens"))
        put(self, "kv_heads", _whole(kv_heads, "kv_heads"))
        put(self, "head_dim", _whole(head_dim, "head_dim"))
        put(self, "dtype", dtype_of(dtype))
        put(self, "attention", choice(Attention, attention, "layout.attention", LayoutInvalid))
        self._check()

    def _check(self) -> None:
        limits = {
            "num_layers": _LAYERS_MAX,
            "chunk_tokens": _TOKENS_MAX,
            "kv_heads": _HEADS_MAX,
            "head_dim": _DIM_MAX,
        }
        for name, limit_max in limits.items():
            value = getattr(self, name)
            if not 1 <= value <= limit_max:
                raise LayoutInvalid(f"{value} is not in 1..{limit_max}", field=f"layout.{name}")
        if self.attention is Attention.MLA and self.kv_heads != 1:
            raise LayoutInvalid(f"{self.kv_heads}, but latent attention has one latent head", field="layout.kv_heads")
        if self.slice_bytes > SLICE_BYTES_MAX:
            raise LayoutInvalid(f"a slice of {self.slice_bytes} bytes is over {SLICE_BYTES_MAX}", field="layout")

    @property
    def planes(self) -> int:
        """Matrices per layer: K and V, or the latent alone."""
        return 2 if self.attention is Attention.KV_HEADS else 1

    @property
    def slice_bytes(self) -> int:
        """S: bytes of one layer of one chunk."""
        return self.planes * self.chunk_tokens * self.kv_heads * self.head_dim * self.dtype.bytes

    @property
    def chunk_bytes(self) -> int:
        """L·S: bytes of one chunk."""
        return self.num_layers * self.slice_bytes

    def layer_range(self, layer: int) -> tuple[int, int]:
        """[start, stop) of `layer` within a chunk."""
        if not 0 <= layer < self.num_layers:
            raise LayoutInvalid(f"{layer} is not in 0..{self.num_layers - 1}", field="layer")
        return layer * self.slice_bytes, (layer + 1) * self.slice_bytes

    def payload_bytes(self, chunks: int) -> int:
        """W = N·L·S: bytes of `chunks` chunks (ObjectCache, §3.4)."""
        return chunks * self.chunk_bytes
