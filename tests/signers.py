"""Certificates that sign C2PA provenance."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

Key = ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey


def _name(common: str) -> x509.Name:
    organisation = x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Quire tests")
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common), organisation])


def _usage(*, signs: bool, certifies: bool) -> x509.KeyUsage:
    return x509.KeyUsage(signs, False, False, False, False, certifies, certifies, False, False)


def make_signer(folder: Path, key: Key | None = None) -> tuple[Path, Path]:
    """Files in PEM: the signer's certificate with its authority's, and its key (Ed25519 if none is given)."""
    authority, key = ed25519.Ed25519PrivateKey.generate(), key or ed25519.Ed25519PrivateKey.generate()
    now = dt.datetime.now(dt.UTC)
    until = now + dt.timedelta(days=2)

    def begin(common: str, public: CertificatePublicKeyTypes) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder(_name("authority"), _name(common), public, x509.random_serial_number())
        return builder.not_valid_before(now - dt.timedelta(days=1)).not_valid_after(until)

    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    mail = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.EMAIL_PROTECTION])
    certificates = [
        begin("signer", key.public_key())
        .add_extension(x509.BasicConstraints(False, None), True)
        .add_extension(_usage(signs=True, certifies=False), True)
        .add_extension(mail, False)
        .add_extension(issuer, False)
        .sign(authority, None),
        begin("authority", authority.public_key())
        .add_extension(x509.BasicConstraints(True, None), True)
        .add_extension(_usage(signs=False, certifies=True), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), False)
        .sign(authority, None),
    ]
    chain, private = folder / "signer.pem", folder / "signer.key"
    chain.write_bytes(b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return chain, private
