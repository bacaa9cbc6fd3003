"""Keys and values as arrays, and as the slices of chunks: (chunks, planes, tokens, heads, head_dim) per layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from quire.model.errors import InvalidRequest, LayoutInvalid
from quire.model.layout import Dtype, KvLayout, dtype_of

_FRAMEWORKS: Final = ("numpy", "torch")
_BITS: Final = {1: "uint8", 2: "uint16"}
"""Element types of numpy by their size, for those that numpy does not have: bf16 and fp8."""
_NUMPY: Final = {Dtype.FP32: "float32", Dtype.FP16: "float16"}
_TORCH: Final = {
    Dtype.FP32: "float32",
    Dtype.FP16: "float16",
    Dtype.BF16: "bfloat16",
    Dtype.FP8_E4M3: "float8_e4m3fn",
    Dtype.FP8_E5M2: "float8_e5m2",
}


def framework_of(name: str) -> str:
    """Return the name of a framework whose arrays there are, in lower case. Raises `InvalidRequest`."""
    framework = str(name).lower()
    if framework not in _FRAMEWORKS:
        raise InvalidRequest(f"{framework!r}; there are {', '.join(_FRAMEWORKS)}", field="framework")
    return framework


def on_current_streams(layers: Any) -> Callable[[], AbstractContextManager[object]]:
    """Return what another thread enters to work on the calling thread's current streams of the layers' GPUs.

    A copy there then waits for the kernels that compute the layers.
    """
    planes = [plane for layer in layers for plane in (layer if isinstance(layer, tuple | list) else (layer,))]
    devices = {plane.device for plane in planes if getattr(plane, "is_cuda", False)}
    if not devices:
        return nullcontext
    import torch

    streams = [torch.cuda.current_stream(device) for device in devices]

    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield

    return entered


def pack_layer(layer: Any, slices: npt.NDArray[np.uint8], layout: KvLayout, number: int, prompt_tokens: int) -> None:
    """Write the planes of one layer where a store reads them.

    Args:
        layer: Keys and values (with latent attention: the latents alone), numpy arrays or torch tensors of
            (tokens, kv_heads, head_dim) or (chunks, chunk_tokens, kv_heads, head_dim). Tokens behind the last whole
            chunk are left out.
        slices: (chunks, slice bytes), the layer in the buffer.
        layout: Of the chunks.
        number: Of the layer, for errors.
        prompt_tokens: Length of the prompt: the most tokens that there may be.

    Raises:
        InvalidRequest: Other planes, other dimensions, fewer tokens, or another element type.
    """
    field = f"layers[{number}]"
    if not hasattr(layer, "shape") and not isinstance(layer, tuple | list):
        raise InvalidRequest(f"a {type(layer).__name__}; arrays are wanted", field=field)
    planes = (layer,) if layout.planes == 1 and hasattr(layer, "shape") else tuple(layer)
    if len(planes) != layout.planes:
        expected = "keys and values" if layout.planes == 2 else "latents alone"
        raise InvalidRequest(f"{len(planes)} arrays; {expected}", field=field)
    chunks, tokens = len(slices), len(slices) * layout.chunk_tokens
    token_bytes = layout.kv_heads * layout.head_dim * layout.dtype.bytes
    rows = slices.reshape(chunks, layout.planes, layout.chunk_tokens, token_bytes)
    for plane, states in enumerate(planes):
        states_of_tokens = _token_rows(states, layout, tokens, prompt_tokens, field)
        rows[:, plane] = states_of_tokens.reshape(chunks, layout.chunk_tokens, token_bytes)


def _token_rows(states: Any, layout: KvLayout, tokens: int, prompt_tokens: int, field: str) -> npt.NDArray[np.uint8]:
    """Return the bytes of the first tokens, (tokens, bytes)."""
    shape = tuple(getattr(states, "shape", ()))
    heads, elements = (layout.kv_heads, layout.head_dim), layout.kv_heads * layout.head_dim
    leading = shape[:-2] if shape[-2:] == heads else shape[:-1] if shape[-1:] == (elements,) else ()
    if len(leading) not in (1, 2) or (len(leading) == 2 and leading[1] != layout.chunk_tokens):
        expected = f"(tokens, {heads[0]}, {heads[1]}) or (chunks, {layout.chunk_tokens}, {heads[0]}, {heads[1]})"
        raise InvalidRequest(f"shape {shape}; {expected} are wanted", field=field)
    token_count = math.prod(leading)
    if not tokens <= token_count <= prompt_tokens:
        about = f"the prompt has {prompt_tokens}, its whole chunks {tokens}"
        raise InvalidRequest(f"{token_count} tokens; {about}", field=field)
    if not _fits(states.dtype, layout.dtype):
        raise InvalidRequest(f"elements are {states.dtype}; the layout has {layout.dtype.value[0]}", field=field)
    if hasattr(states, "detach"):
        import torch

        flat = states.detach().reshape(token_count, elements)[:tokens].contiguous().cpu()
        return np.asarray(flat.view(torch.uint8).numpy())
    return np.ascontiguousarray(states).reshape(token_count, elements)[:tokens].view(np.uint8)


def _fits(dtype: Any, expected: Dtype) -> bool:
    if expected not in _NUMPY and str(dtype).removeprefix("torch.") == _BITS[expected.bytes]:
        return True
    try:
        return dtype_of(str(dtype)) is expected
    except LayoutInvalid:
        return False


def layer_views(slices: npt.NDArray[np.uint8], layout: KvLayout, framework: str) -> tuple[Any, ...]:
    """Return the planes of one delivered layer, without a copy.

    Args:
        slices: (chunks, slice bytes), the layer in the buffer.
        layout: Of the chunks.
        framework: "numpy" or "torch". Arrays of numpy have the bits of bf16 and fp8 as uint16 and uint8.

    Returns:
        Keys and values (with latent attention: the latents), each (chunks, chunk_tokens, kv_heads, head_dim).
    """
    shape = (len(slices), layout.planes, layout.chunk_tokens, layout.kv_heads, layout.head_dim)
    if framework == "torch":
        import torch

        planes: Any = torch.from_numpy(slices).view(getattr(torch, _TORCH[layout.dtype])).view(shape)
    else:
        planes = slices.view(_NUMPY.get(layout.dtype) or _BITS[layout.dtype.bytes]).reshape(shape)
    return tuple(planes[:, plane] for plane in range(layout.planes))


def check_layers(layers: Sequence[Any], layout: KvLayout) -> None:
    """Check the number of layers. Raises `InvalidRequest`."""
    count = len(layers) if isinstance(layers, list | tuple) or hasattr(layers, "shape") else -1
    if count != layout.num_layers:
        description = f"{count} layers" if count >= 0 else f"a {type(layers).__name__}"
        raise InvalidRequest(f"{description}; the layout has {layout.num_layers}", field="layers")
