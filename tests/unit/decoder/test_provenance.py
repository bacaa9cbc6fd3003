"""Provenance: what may be said, and that what is signed is what is served."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path

import c2pa
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from PIL import Image

from quire.model.errors import ConfigInvalid, InvalidRequest
from quire.model.images import MEDIA_TYPES, ImageAttributes, ImageEntry, Rendering
from quire.model.provenance import GENERATED, checked_provenance
from quire_decoder.adapters.provenance import C2paProvenance
from tests.signers import Key, make_signer

ENTRY = ImageEntry("cats/tom", bytes(32), 4096, bytes(32), "", 48, 64, provenance=GENERATED)


def _image(form: str) -> bytes:
    file, pixels = io.BytesIO(), np.random.default_rng(1).integers(0, 255, (48, 64, 3), np.uint8)
    Image.fromarray(pixels).save(file, form.upper())
    return file.getvalue()


def _manifest(signed: bytes, media_type: str) -> tuple[str, dict[str, object]]:
    """Whether it is valid, and what it says."""
    with c2pa.Reader(media_type, io.BytesIO(signed)) as reader:
        return reader.get_validation_state() or "", reader.get_active_manifest() or {}


@pytest.mark.parametrize("key", [None, ec.generate_private_key(ec.SECP256R1())], ids=["Ed25519", "P-256"])
@pytest.mark.parametrize("form", MEDIA_TYPES)
async def test_every_format_is_signed(tmp_path: Path, form: str, key: Key | None) -> None:
    """The pixels stay; the manifest is valid, and not any more when a pixel is another."""
    signer, plain = C2paProvenance(*make_signer(tmp_path, key)), _image(form)
    signed = await signer.sign(plain, Rendering(form), ENTRY)
    state, manifest = _manifest(signed, MEDIA_TYPES[form])
    assert (state, manifest["title"]) == ("Valid", "cats/tom")
    assert "trainedAlgorithmicMedia" in json.dumps(manifest["assertions"])
    with Image.open(io.BytesIO(signed)) as after, Image.open(io.BytesIO(plain)) as before:
        assert (np.array(after) == np.array(before)).all()
    assert len(signed) - len(plain) < 16 << 10
    spoilt = bytearray(signed)
    spoilt[signed.index(plain[len(plain) // 2 :][:32])] ^= 1
    assert _manifest(bytes(spoilt), MEDIA_TYPES[form])[0] == "Invalid"


async def test_many_at_once(tmp_path: Path) -> None:
    signer, plain = C2paProvenance(*make_signer(tmp_path)), _image("jpeg")
    signing = [signer.sign(plain, Rendering("jpeg"), replace(ENTRY, image_id=f"i{number}")) for number in range(40)]
    for number, signed in enumerate(await asyncio.gather(*signing)):
        state, manifest = _manifest(signed, "image/jpeg")
        assert (state, manifest["title"]) == ("Valid", f"i{number}")


async def test_what_no_manifest_holds(tmp_path: Path) -> None:
    """The image's request fails, and no other."""
    signer = C2paProvenance(*make_signer(tmp_path))
    nothing = checked_provenance('{"assertions": [{"label": "c2pa.actions", "data": {"actions": 7}}]}')
    with pytest.raises(InvalidRequest, match="no manifest"):
        await signer.sign(_image("png"), Rendering(), replace(ENTRY, provenance=nothing))
    with pytest.raises(InvalidRequest):
        await signer.sign(b"no image", Rendering(), ENTRY)
    assert await signer.sign(_image("png"), Rendering(), ENTRY)


def test_certificates_that_sign_nothing(tmp_path: Path) -> None:
    chain, key = make_signer(tmp_path)
    (tmp_path / "bad").write_text("no key")
    (tmp_path / "other").mkdir()
    _, other = make_signer(tmp_path / "other")
    for files in (
        (tmp_path / "none", key),
        (chain, tmp_path / "none"),
        (chain, tmp_path / "bad"),
        (key, key),
        (chain, other),
    ):
        with pytest.raises(ConfigInvalid, match="sign nothing"):
            C2paProvenance(*files)


def test_what_may_be_said() -> None:
    assert checked_provenance("") == ""
    assert checked_provenance("generated") == GENERATED == checked_provenance(GENERATED)
    mine = checked_provenance('{"title": "Kätzchen", "assertions": [{"label": "org.me", "data": {"a": 1}}]}')
    assert mine.isascii() and json.loads(mine)["title"] == "Kätzchen"
    assert ImageAttributes(provenance="generated").provenance == GENERATED


@pytest.mark.parametrize(
    "said",
    [
        "yes",
        "[]",
        '{"assertions": []}',
        '{"assertions": [{"label": "org.me"}]}',
        '{"assertions": [{"label": "", "data": {}}]}',
        '{"assertions": [{"label": "c2pa.hash.data", "data": {}}]}',
        '{"assertions": [{"label": "org.me", "data": {}}], "title": 3}',
        '{"assertions": [{"label": "org.me", "data": {}}], "ingredients": []}',
        '{"assertions": [{"label": "org.me", "data": {"a": "' + "x" * 5000 + '"}}]}',
        "[" * 4000,
    ],
)
def test_what_may_not(said: str) -> None:
    with pytest.raises(InvalidRequest):
        checked_provenance(said)


def test_other_provenance_is_another_version() -> None:
    """A URL with a version means the same for ever; bytes of signatures differ, so that ETags with them are weak."""
    plain = replace(ENTRY, provenance="")
    other = replace(ENTRY, provenance=checked_provenance('{"assertions": [{"label": "org.me", "data": {}}]}'))
    assert len({each.version for each in (plain, ENTRY, other)}) == 3
    etags = [Rendering().etag(each, "build") for each in (plain, ENTRY, other)]
    assert len({each.removeprefix("W/") for each in etags}) == 3
    assert [each.startswith("W/") for each in etags] == [False, True, True]
