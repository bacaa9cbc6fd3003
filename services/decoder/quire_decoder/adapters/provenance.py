"""C2PA manifests, written into image files and signed with the cluster's certificate (c2pa-python)."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from quire import __version__
from quire.model.errors import ConfigInvalid, InvalidRequest
from quire.model.images import ImageEntry, Rendering

_PIXEL: Final = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)
"""A PNG."""
_SETTINGS: Final = {"builder": {"thumbnail": {"enabled": False}}, "verify": {"verify_after_sign": False}}


class C2paProvenance:
    """`certificates`: a PEM file, the signer's first, then those that it was issued by. `private_key`: its key, PEM.

    Ed25519, ECDSA on P-256 and P-384, and RSA keys sign. There is no time stamp: nothing leaves the cluster.
    """

    def __init__(self, certificates: Path, private_key: Path) -> None:
        """Read the files. Raises `ConfigInvalid`."""
        try:
            import c2pa
        except ImportError:
            raise ConfigInvalid(
                "signing provenance takes c2pa-python, which the extra `provenance` of Quire brings"
            ) from None
        self._c2pa: Any = c2pa
        self._context = c2pa.Context(c2pa.Settings.from_dict(_SETTINGS))
        try:
            chain, key = certificates.read_bytes(), private_key.read_bytes()
            self._signer = c2pa.Signer.from_info(c2pa.C2paSignerInfo(_algorithm(chain, key), chain, key, None))
            self._sign(_PIXEL, "image/png", "{}")  # it says only then what it does not take
        except (OSError, ValueError, UnsupportedAlgorithm, c2pa.C2paError) as error:
            raise ConfigInvalid(f"{certificates} and {private_key} sign nothing: {error}") from None
        self._name = hashlib.sha256(chain).hexdigest()[:16]

    @property
    def name(self) -> str:
        return self._name

    async def sign(self, image: bytes, rendering: Rendering, entry: ImageEntry) -> bytes:
        """The image with a signed manifest that says what the entry's provenance does.

        Its salts are random: bytes differ from call to call. Raises `InvalidRequest` for what no manifest can hold.
        """
        manifest = json.dumps({"title": entry.image_id} | json.loads(entry.provenance))
        try:
            return await asyncio.to_thread(self._sign, image, rendering.media_type, manifest)
        except self._c2pa.C2paError as error:
            raise InvalidRequest(f"{entry.image_id!r}: no manifest: {error}", field="provenance") from None

    def _sign(self, image: bytes, media_type: str, definition: str) -> bytes:
        generator = {"name": "Quire", "version": __version__}
        manifest = json.loads(definition) | {"claim_generator_info": [generator], "format": media_type}
        signed = io.BytesIO()
        with self._c2pa.Builder(json.dumps(manifest), self._context) as builder:
            builder.sign(self._signer, media_type, io.BytesIO(image), signed)
        return signed.getvalue()


def _algorithm(certificates: bytes, private_key: bytes) -> str:
    """Return C2PA's name of a key's algorithm. Raises `ValueError`, also if the first certificate is not the key's."""
    key = serialization.load_pem_private_key(private_key, None)
    if x509.load_pem_x509_certificates(certificates)[0].public_key() != key.public_key():
        raise ValueError("the first certificate is of another key")
    match key:
        case ed25519.Ed25519PrivateKey():
            return "ed25519"
        case ec.EllipticCurvePrivateKey() if key.curve.name in ("secp256r1", "secp384r1"):
            return "es256" if key.curve.name == "secp256r1" else "es384"
        case rsa.RSAPrivateKey():
            return "ps256"
    raise ValueError(f"{type(key).__name__} is not among Ed25519, P-256, P-384 and RSA")
