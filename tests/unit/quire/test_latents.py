"""Latent records: bit-exact for any values, sound against damage, bounded against bombs."""

from __future__ import annotations

import struct
from dataclasses import replace

import cbor2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import save

from quire.model.errors import CorruptData, QuireError
from quire.model.latents import (
    DecodeRule,
    LatentInfo,
    Normalisation,
    RecordInvalid,
    Vae,
    decode_record,
    denormalised,
    encode_record,
    from_bytes,
    from_safetensors,
    read_info,
)

VAE = Vae("someone/vae", "main", "ab" * 32, "AutoencoderTiny", {"latent_channels": 4})


def _info(shape: tuple[int, int, int], dtype: str, **changes: object) -> LatentInfo:
    return replace(LatentInfo(shape, dtype, VAE, shape[1] * 8, shape[2] * 8), **changes)  # type: ignore[arg-type]


@settings(max_examples=150)
@given(
    st.sampled_from(["float16", "float32", "bfloat16"]),
    st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9)),
    st.data(),
)
def test_any_bits_come_back(dtype: str, shape: tuple[int, int, int], data: st.DataObject) -> None:
    """Every bit pattern there is: NaN with payloads, infinities, negative zeros, subnormals."""
    bits = np.uint32 if dtype == "float32" else np.uint16
    raw = data.draw(hnp.arrays(bits, shape))
    values = raw if dtype == "bfloat16" else raw.view(dtype)
    info = _info(
        shape,
        dtype,
        normalisation=Normalisation(0.18215, 0.1, (0.5,) * shape[0], (2.0,) * shape[0]),
        decode=DecodeRule("float16", True, True, False),
        versions={"torch": "2.13"},
        perceptual_hash=b"12345678",
        created_ms=5,
    )
    record = encode_record(values, info)
    back, said = decode_record(record)
    assert back.dtype == values.dtype
    assert np.array_equal(back.view(bits), raw)
    assert replace(said, sha256=b"") == info
    assert read_info(record) == said


def test_smooth_latents_get_smaller() -> None:
    noise = np.random.default_rng(0).normal(size=(16, 64, 64)).astype(np.float16)
    assert len(encode_record(noise, _info((16, 64, 64), "float16"))) < 0.95 * noise.nbytes


def _record() -> bytes:
    values = np.random.default_rng(1).normal(size=(4, 8, 8)).astype(np.float16)
    return encode_record(values, _info((4, 8, 8), "float16"))


def test_every_truncation_is_noticed() -> None:
    record = _record()
    for length in range(len(record)):
        with pytest.raises(QuireError):
            decode_record(record[:length])
    with pytest.raises(CorruptData):
        decode_record(record + b"x")


def test_every_flipped_bit_is_noticed() -> None:
    """In the prefix, in the header, in the values: an error, or (padding inside a stream) the very same values."""
    record = _record()
    values, info = decode_record(record)
    for at in range(len(record)):
        if 5 <= at < 8:
            continue
        damaged = bytearray(record)
        damaged[at] ^= 1 << (at % 8)
        try:
            back, said = decode_record(bytes(damaged))
        except QuireError:
            continue
        assert np.array_equal(back, values)
        assert said == info


@pytest.mark.parametrize(
    "shape", [(1 << 30, 1 << 30, 1 << 30), (5000, 1, 1), (0, 4, 4), (4, 4), (-1, 4, 4), (1, 1 << 13, 1 << 14)]
)
def test_bombs_are_refused_before_anything_is_allocated(shape: tuple[int, ...]) -> None:
    """A header, checksum and all, that promises more than any machine holds."""
    import zlib

    record = _record()
    _, _, length, _ = struct.unpack_from("<4sB3xII", record)
    header = cbor2.loads(record[16 : 16 + length]) | {"shape": list(shape)}
    packed = cbor2.dumps(header)
    bomb = struct.pack("<4sB3xII", b"QLAT", 1, len(packed), zlib.crc32(packed)) + packed + record[16 + length :]
    with pytest.raises(RecordInvalid):
        decode_record(bomb)


def test_a_channel_that_decompresses_to_more_is_refused() -> None:
    """The stream of 4,096 values where the header says 64."""
    import zlib

    from pcodec import ChunkConfig, standalone

    record = _record()
    _, _, length, _ = struct.unpack_from("<4sB3xII", record)
    stream = standalone.simple_compress(np.zeros(4096, dtype=np.float16), ChunkConfig())
    header = cbor2.loads(record[16 : 16 + length]) | {"sizes": [len(stream)] * 4}
    packed = cbor2.dumps(header)
    bomb = struct.pack("<4sB3xII", b"QLAT", 1, len(packed), zlib.crc32(packed)) + packed + stream * 4
    with pytest.raises(CorruptData):
        decode_record(bomb)


_ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=40),
    st.lists(st.one_of(st.integers(), st.floats(), st.text(max_size=3)), max_size=5),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@given(st.data())
def test_headers_of_the_wrong_types_are_refused(data: st.DataObject) -> None:
    """Valid CBOR under a valid checksum, with one value replaced by anything."""
    import zlib

    record = _record()
    _, _, length, _ = struct.unpack_from("<4sB3xII", record)
    header = cbor2.loads(record[16 : 16 + length])
    within = (
        header[data.draw(st.sampled_from(["vae", "decode", "normalisation"]))] if data.draw(st.booleans()) else header
    )
    within[data.draw(st.sampled_from(sorted(within)))] = data.draw(_ANYTHING)
    packed = cbor2.dumps(header)
    other = struct.pack("<4sB3xII", b"QLAT", 1, len(packed), zlib.crc32(packed)) + packed + record[16 + length :]
    try:
        values, info = decode_record(other)
        denormalised(values, info)
    except QuireError:
        return
    expected, _ = decode_record(record)
    assert values.tobytes() == expected.tobytes(), "what is accepted has the values that were stored"


@given(st.binary(max_size=400))
def test_noise_is_no_record(noise: bytes) -> None:
    for raw in (noise, b"QLAT\x01\0\0\0" + noise):
        with pytest.raises(QuireError):
            decode_record(raw)
    with pytest.raises(QuireError):
        from_safetensors(noise)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batched", [False, True])
def test_safetensors(dtype: torch.dtype, batched: bool) -> None:
    tensor = torch.randn(4, 6, 5).to(dtype)
    raw = save({"latent": tensor[None] if batched else tensor})
    values, name = from_safetensors(raw)
    assert name == str(dtype).removeprefix("torch.")
    bits = tensor.view(torch.int32 if dtype == torch.float32 else torch.int16).numpy()
    assert np.array_equal(values.view(bits.dtype), bits)
    with pytest.raises(RecordInvalid):
        from_safetensors(raw[:-1])
    with pytest.raises(RecordInvalid):
        from_safetensors(save({"a": tensor, "b": tensor.clone()}))
    with pytest.raises(RecordInvalid):
        from_safetensors(save({"a": torch.zeros(3, 3, 3, dtype=torch.int64)}))


def test_raw_bytes() -> None:
    values = np.random.default_rng(2).normal(size=(3, 4, 5)).astype("<f4")
    assert np.array_equal(from_bytes(values.tobytes(), (3, 4, 5), "float32"), values)
    with pytest.raises(RecordInvalid, match="bytes"):
        from_bytes(values.tobytes(), (3, 4, 6), "float32")


def test_normalisation_is_undone_as_diffusers_does() -> None:
    """Scaling and shift (FLUX, SD 3), per-channel statistics (Wan and others), and not twice."""
    values = np.random.default_rng(3).normal(size=(2, 3, 3)).astype(np.float32)
    scaled = _info((2, 3, 3), "float32", normalisation=Normalisation(0.3611, 0.1159))
    assert np.allclose(denormalised(values, scaled), values / 0.3611 + 0.1159)
    stats = _info((2, 3, 3), "float32", normalisation=Normalisation(0.5, 0.0, (1.0, 2.0), (3.0, 4.0)))
    expected = values * np.array([3, 4])[:, None, None] / 0.5 + np.array([1, 2])[:, None, None]
    assert np.allclose(denormalised(values, stats), expected)
    undone = _info((2, 3, 3), "float32", normalisation=Normalisation(0.5, 1.0, undone=True))
    assert np.array_equal(denormalised(values, undone), values)
    tensor = torch.randn(2, 3, 3).to(torch.bfloat16)
    half = _info((2, 3, 3), "bfloat16")
    assert np.array_equal(denormalised(tensor.view(torch.int16).numpy().view(np.uint16), half), tensor.float().numpy())


@pytest.mark.parametrize(
    "changes",
    [
        {"normalisation": Normalisation(0.0)},
        {"normalisation": Normalisation(1e-45)},
        {"normalisation": Normalisation(float("nan"))},
        {"normalisation": Normalisation(1e300)},
        {"normalisation": Normalisation(10**400)},
        {"normalisation": Normalisation(1.0, float("inf"))},
        {"normalisation": Normalisation(1.0, 0.0, (1.0,))},
        {"layout": "spiral"},
        {"height": 0},
        {"width": 1 << 20},
    ],
)
def test_infos_that_make_no_sense(changes: dict[str, object]) -> None:
    with pytest.raises(RecordInvalid):
        _info((4, 4, 4), "float16", **changes)
    with pytest.raises(RecordInvalid, match="float64"):
        _info((4, 4, 4), "float64")
