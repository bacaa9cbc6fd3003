"""A private certificate authority for trials and small clusters; a company's own, or cert-manager, does as well.

`ca.pem`, `ca-key.pem`: the authority; `ca.pem` also has those that are trusted beside it. A folder for each service
has `ca.crt`, `tls.crt` and `tls.key`, made out to the members' name and to the service's, not to addresses;
`operator`: for those who use the admin frontend; `public`: what clients see at the gateway, made out to its hosts.
Made again on a folder that has an authority, the others are replaced: services take them up without a restart.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from quire.model.errors import InvalidRequest
from quire.wire.tls import MEMBER_NAME, OPERATOR, SERVICES, name_of

_AUTHORITY_DAYS: Final = 3650
_EARLIER: Final = datetime.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """PEM files of one holder."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files of the certificates. `members`: by the name of the service, and of `operator`."""

    ca: Path
    members: Mapping[str, Pair]
    public: Pair


def make(folder: Path, hosts: Sequence[str], days: int, trusted: Sequence[Path] = ()) -> Certificates:
    """Make an authority, if there is none, and new certificates of it.

    Args:
        folder: Where they go.
        hosts: Names and addresses by which clients reach a gateway.
        days: How long the certificates are valid.
        trusted: Files (PEM) of other authorities that `ca.pem` and each `ca.crt` name, too, while one replaces another.

    Raises:
        InvalidRequest: `days` is below one, or a file of `trusted` has no certificate.
    """
    if days < 1:
        raise InvalidRequest(f"{days} days", field="days")
    additions = [_read(file) for file in trusted]
    folder.mkdir(parents=True, exist_ok=True)
    ca_key, ca = _authority(folder)
    authorities = b"".join([ca.public_bytes(serialization.Encoding.PEM), *additions])
    _write(folder / "ca.pem", authorities, 0o644)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]

    def pair(name: str, names: Sequence[str], usage: Sequence[x509.ObjectIdentifier]) -> Pair:
        pair = Pair(folder / name / "tls.crt", folder / name / "tls.key")
        pair.cert.parent.mkdir(exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        cert = _issued(f"quire {name}", key, names=names, usage=usage, ca_key=ca_key, ca=ca, days=days)
        _write(folder / name / "ca.crt", authorities, 0o644)
        # The key first: who reads between the two has a pair that does not match, and tries again later.
        _write(pair.key, _pem(key), 0o600)
        _write(pair.cert, cert.public_bytes(serialization.Encoding.PEM), 0o644)
        return pair

    members = {name: pair(name, [MEMBER_NAME, name_of(name)], usages) for name in (*SERVICES, OPERATOR)}
    return Certificates(folder / "ca.pem", members, pair("public", ["localhost", "127.0.0.1", *hosts], usages[:1]))


def _read(file: Path) -> bytes:
    try:
        certificates = x509.load_pem_x509_certificates(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{file} has no certificates: {error}", field="trusted") from None
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in certificates)


def _authority(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key_file, cert_file = folder / "ca-key.pem", folder / "ca.pem"
    if key_file.exists() and cert_file.exists():
        key = serialization.load_pem_private_key(key_file.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise InvalidRequest(f"{key_file} is no key of ours", field="folder")
        return key, x509.load_pem_x509_certificate(cert_file.read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "quire authority")])
    builder = _builder(name, name, key.public_key(), _AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(authority=True), critical=True)
    cert = builder.sign(key, hashes.SHA256())
    _write(key_file, _pem(key), 0o600)
    return key, cert


def _issued(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    names: Sequence[str],
    usage: Sequence[x509.ObjectIdentifier],
    ca_key: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate,
    days: int,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        _builder(subject, ca.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_general(address) for address in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(_key_identifier(ca), critical=False)
    )
    return builder.sign(ca_key, hashes.SHA256())


def _key_identifier(ca: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    """Return the identifier of the authority's key, as its certificate has it: tools compute it in several ways."""
    try:
        own = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    except x509.ExtensionNotFound:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.public_key())  # type: ignore[arg-type]
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own.value)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(file: Path, content: bytes, mode: int) -> None:
    """Whole or not at all."""
    part = file.with_name(f"{file.name}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as out:
        out.write(content)
    part.replace(file)
