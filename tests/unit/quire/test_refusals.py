"""Values that mean nothing are refused where they are made, and the error names the field."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cbor2
import numpy as np
import pytest

from quire.model import errors
from quire.model.chunk_object import sound_header
from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.errors import InvalidRequest, LeaseForged, QuireError
from quire.model.hashing import Namespace, block_keys
from quire.model.images import (
    RECORD_BYTES_MAX,
    ImageAttributes,
    ImageEntry,
    Rendering,
    entry_of_record,
    record_namespace,
)
from quire.model.keys import KEYS_MAX, ChunkKeys
from quire.model.latents import (
    DecodeRule,
    LatentInfo,
    Normalisation,
    RecordInvalid,
    Vae,
    decode_record,
    encode_record,
    from_safetensors,
)
from quire.model.layout import Dtype, KvLayout
from quire.model.lease import LeaseSigner
from quire.model.nodes import GatewayInfo, Node, StorageInfo
from quire.model.policy import NamespacePolicy, TenantPolicy, TenantState
from quire.model.records import UNCHAINED_MAX, records

_LAYOUT = KvLayout(2, 16, 1, 8, Dtype.FP16)
_KEYS = ChunkKeys(bytes(range(64)))
_TARGET = RdmaTarget(b"worker", 4096, 1 << 20, b"key")
_DESCRIPTOR = Descriptor(_KEYS, 2, 16, 512, DeliveryOrder.LAYERWISE, _TARGET)
_IMAGE = ImageEntry("cat", bytes(32), 100, bytes(32), "", 512, 512)
_LATENT = LatentInfo((4, 2, 2), "float32", Vae("stabilityai/sd-vae"), 16, 16)


def _namespace(**changed: Any) -> Callable[[], Namespace]:
    return lambda: replace(Namespace("llama", "1", _LAYOUT), **changed)


def _descriptor(**changed: Any) -> Callable[[], Descriptor]:
    return lambda: replace(_DESCRIPTOR, **changed)


def _image(**changed: Any) -> Callable[[], ImageEntry]:
    return lambda: replace(_IMAGE, **changed)


def _latent(**changed: Any) -> Callable[[], LatentInfo]:
    return lambda: replace(_LATENT, **changed)


@pytest.mark.parametrize(
    ("field", "made"),
    [
        ("namespace.model_id", _namespace(model_id="")),
        ("namespace.adapter", _namespace(adapter="a" * 10_000)),
        ("namespace.tenant_salt", _namespace(tenant_salt=bytes(10_000))),
        ("descriptor.num_layers", _descriptor(num_layers=0)),
        ("descriptor.per_layer_chunk_bytes", _descriptor(slice_bytes=0)),
        ("descriptor.chunk_tokens", _descriptor(chunk_tokens=1 << 16)),
        ("descriptor.chunk_keys", _descriptor(keys=ChunkKeys(b""))),
        ("descriptor.first_chunk, chunk_count", _descriptor(first_chunk=2)),
        ("descriptor.first_chunk, chunk_count", _descriptor(first_chunk=1, chunk_count=2)),
        ("descriptor.chunk_offsets", _descriptor(chunk_offsets=bytes(8))),
        ("descriptor.chunk_offsets", _descriptor(chunk_offsets=struct.pack("<QQ", 0, 1 << 63))),
        ("descriptor.chunk_offsets", _descriptor(chunk_offsets=struct.pack("<QQ", 0, 511))),
        ("descriptor.layer_stride", _descriptor(layer_stride=1023)),
        ("chunk_keys", lambda: ChunkKeys(bytes(64)).distinct()),
        ("chunk_keys", lambda: _KEYS.run(1, 2)),
        ("chunk_keys", lambda: _KEYS.run(-1, 1)),
        ("tokens", lambda: block_keys(Namespace("llama", "1", replace(_LAYOUT, chunk_tokens=1)), range(KEYS_MAX + 1))),
        ("chunk_keys", lambda: records(_KEYS, 0, UNCHAINED_MAX + 1, unchained=True)),
        ("namespace", lambda: NamespacePolicy(b"short", 0, 0)),
        ("ttl_s", lambda: NamespacePolicy(bytes(16), -1, 0)),
        ("ttl_s", lambda: NamespacePolicy(bytes(16), 1 << 40, 0)),
        ("quota_bytes", lambda: NamespacePolicy(bytes(16), 0, -1)),
        ("weight", lambda: TenantPolicy("a", weight=0)),
        ("weight", lambda: TenantPolicy("a", weight=float("nan"))),
        ("cap_bytes_per_s", lambda: TenantPolicy("a", cap_bytes_per_s=-1)),
        ("stored_bytes_max", lambda: TenantPolicy("a", stored_bytes_max=-1)),
        ("node.node_id", lambda: Node(node_id="a b", about=GatewayInfo())),
        ("id", _image(image_id="")),
        ("record_sha256, latent_sha256, record_name", _image(latent_sha256=b"")),
        ("record_bytes", _image(record_bytes=0)),
        ("record_bytes", _image(record_bytes=RECORD_BYTES_MAX + 1)),
        ("height, width", _image(width=(1 << 16) + 1)),
        ("ttl", lambda: ImageAttributes(ttl_ms=-1)),
        ("metadata", lambda: ImageAttributes(metadata=(("Large", "x"),))),
        ("metadata", lambda: ImageAttributes(metadata=(("a", "line\n"),))),
        ("metadata", lambda: ImageAttributes(metadata=(("a", "x" * 10_000),))),
        ("metadata", lambda: ImageAttributes(metadata=(("a", "x"), ("a", "y")))),
        ("format", lambda: Rendering(format="gif")),
        ("quality", lambda: Rendering(quality=101)),
        ("width", lambda: Rendering(width=-1)),
        ("height", lambda: Rendering(height=1 << 20)),
        ("record", lambda: entry_of_record("cat", bytes(RECORD_BYTES_MAX + 1))),
        ("record", lambda: entry_of_record("cat", b"QLAT" + bytes(12))),
        ("layout", _latent(layout="hwc")),
        ("height, width", _latent(height=0)),
        ("height, width", _latent(width=1)),
        ("decode.dtype", _latent(decode=DecodeRule(dtype="int8"))),
        ("shift_factor", _latent(normalisation=Normalisation(shift_factor=float("inf")))),
        ("scaling_factor", _latent(normalisation=Normalisation(scaling_factor=0.0))),
        ("mean", _latent(normalisation=Normalisation(mean=(1.0,)))),
        ("std", _latent(normalisation=Normalisation(std=(1.0, 1.0, 1.0, float("nan"))))),
        ("values", lambda: encode_record(np.zeros((4, 2, 3), np.float32), _LATENT)),
        (
            "vae.config",
            lambda: encode_record(
                np.zeros((4, 2, 2), np.float32), replace(_LATENT, vae=Vae("r", config={"a": "x" * (1 << 20)}))
            ),
        ),
    ],
)
def test_the_field_is_named(field: str, made: Callable[[], object]) -> None:
    with pytest.raises(QuireError) as refused:
        made()
    assert isinstance(refused.value, InvalidRequest)
    assert refused.value.field == field


def test_what_is_at_the_limit_is_taken() -> None:
    TenantPolicy("a", weight=1e-3)
    TenantPolicy("a", weight=1e3)
    NamespacePolicy(bytes(16), 100 * 365 * 24 * 3600, 0)
    replace(_DESCRIPTOR, first_chunk=1, chunk_count=1)
    replace(_DESCRIPTOR, layer_stride=1024)
    replace(_DESCRIPTOR, chunk_offsets=struct.pack("<QQ", 512, 0))
    replace(_IMAGE, height=1 << 16, width=1 << 16)
    assert len(records(_KEYS, 0, 2, unchained=True)) == 2


@pytest.mark.parametrize(
    ("changed", "field"), [((0, 0xFF), "descriptor"), ((1, 0xFF), "descriptor.order"), ((-1, None), "descriptor")]
)
def test_a_header_that_is_no_descriptor(changed: tuple[int, int | None], field: str) -> None:
    at, value = changed
    raw = bytearray(base64.b64decode(_DESCRIPTOR.to_header(), altchars=b"-_"))
    if value is None:
        del raw[at]
    else:
        raw[at] = value
    with pytest.raises(errors.DescriptorInvalid) as refused:
        Descriptor.from_header(base64.urlsafe_b64encode(raw).decode())
    assert refused.value.field == field


def _record(**changed: Any) -> bytes:
    """A latent record whose header says something else."""
    record = encode_record(np.zeros((4, 2, 2), np.float32), _LATENT)
    magic, version, length, _ = struct.unpack_from("<4sB3xII", record)
    header = cbor2.dumps(cbor2.loads(record[16 : 16 + length]) | changed, canonical=True)
    return struct.pack("<4sB3xII", magic, version, len(header), zlib.crc32(header)) + header + record[16 + length :]


def test_a_record_as_it_was_written_is_read() -> None:
    values, info = decode_record(_record())
    assert values.shape == info.shape == (4, 2, 2)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"codec": "zip"}, "codec"),
        ({"sizes": [1, 2]}, "sizes"),
        ({"sizes": [-1, 1, 1, 1]}, "sizes"),
        ({"vae": 7}, "record"),
        ({"shape": None}, "record"),
    ],
)
def test_a_record_with_another_header(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(RecordInvalid) as refused:
        decode_record(_record(**changed))
    assert refused.value.field == field


@pytest.mark.parametrize("offsets", [[0.0, 64], ["0", 64], [0], 7])
def test_safetensors_with_offsets_that_are_none(offsets: object) -> None:
    header = json.dumps({"latent": {"dtype": "F32", "shape": [4, 2, 2], "data_offsets": offsets}}).encode()
    with pytest.raises(RecordInvalid):
        from_safetensors(struct.pack("<Q", len(header)) + header + bytes(64))


def test_a_lease_of_another_version_is_not_read() -> None:
    body = cbor2.dumps([99, b"id"])
    signed = hmac.new(b"secret", b"quire lease 1" + body, hashlib.sha256).digest() + body
    with pytest.raises(LeaseForged, match="version 99"):
        LeaseSigner(b"secret").open(signed)


def test_keys_by_number() -> None:
    assert _KEYS.at(1) == bytes(range(32, 64))
    assert _KEYS.pick([1, 0]).packed == bytes(range(32, 64)) + bytes(range(32))
    for outside in (-1, 2):
        with pytest.raises(IndexError):
            _KEYS.at(outside)


def test_a_code_of_a_later_version_is_a_bug_to_this_one() -> None:
    assert errors.by_code(errors.ChunkMissing.code()) is errors.ChunkMissing
    assert errors.by_code("from_the_future") is errors.InternalError


def test_what_is_too_short_is_no_chunk_object() -> None:
    assert sound_header(b"short") is None


def test_what_a_node_tells_of_itself() -> None:
    about = StorageInfo(worker_address=b"", capacity_bytes=100, used_bytes=40)
    node = Node(node_id="s-0", about=about, stats={"leases": 2.0}, tenant_stats={"a": 1.0})
    assert node.all_stats == {"capacity": 100, "used": 40, "leases": 2.0, "a": 1.0}
    assert Node(node_id="g-0", about=GatewayInfo()).used_bytes == 0


def test_a_tenant_over_its_limit_has_nothing_left_for_chunks() -> None:
    policy = TenantPolicy("a", stored_bytes_max=100)
    assert TenantState(policy=policy, kept_bytes=30).chunk_bytes_max == 70
    assert TenantState(policy=policy, kept_bytes=130).chunk_bytes_max == 0


@pytest.mark.parametrize("record_bytes", [1, 4096, 1 << 20, (1 << 20) + 1, RECORD_BYTES_MAX])
def test_records_lie_in_few_shapes_and_waste_a_fourth_at_most(record_bytes: int) -> None:
    layout = record_namespace(record_bytes).layout
    assert record_bytes <= layout.chunk_bytes
    assert layout.chunk_bytes <= max(4096, record_bytes * 5 // 4 + 4096)
