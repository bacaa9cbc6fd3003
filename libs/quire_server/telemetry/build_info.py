"""Metrics about the process itself: its build, and when its certificates expire."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from opentelemetry.metrics import CallbackOptions, Observation

from quire import PROTOCOL_VERSION, __version__
from quire.telemetry import meter, names

_UNREADABLE: Final = 0.0
_READ_AGAIN_S: Final = 60.0
_DAY_S: Final = 86_400.0


def publish_build(role: str) -> None:
    """`quire_build_info`: always 1; the versions are labels."""
    about = {
        "version": __version__,
        "protocol": str(PROTOCOL_VERSION),
        "role": role,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    meter().create_observable_gauge(
        names.BUILD_INFO, [lambda _: [Observation(1, about)]], "", "what this process is made of"
    )


def publish_expiry(files: Sequence[Path]) -> None:
    """Publish when the certificates in each PEM file expire (of a chain, the first to).

    Unix time in seconds; 0 for a file that cannot be read.
    """

    def observe(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(expiry_s(file), {"file": str(file)}) for file in files]

    meter().create_observable_gauge(names.CERTIFICATE_EXPIRY, [observe], "s", "when certificates end, Unix time")


def expiry_s(file: Path) -> float:
    """When the first certificate in a file expires, Unix time in seconds; 0 if the file has none."""
    return min((_end_s(certificate) for certificate in _certificates(file)), default=_UNREADABLE)


def _usable_until_s(file: Path) -> float:
    """Return when a file becomes useless: with the member's own certificate, or with the last of its authorities."""
    certificates = _certificates(file)
    if not certificates:
        return _UNREADABLE
    own = [certificate for certificate in certificates if not _is_authority(certificate)]
    return _end_s(own[0]) if own else max(map(_end_s, certificates))


def _certificates(file: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(file.read_bytes())
    except (OSError, ValueError):
        return []


def _end_s(certificate: x509.Certificate) -> float:
    return certificate.not_valid_after_utc.timestamp()


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


class CertificateLife:
    """Days until the first of some files of certificates becomes useless; they are read once a minute."""

    def __init__(self, files: Sequence[str], clock: Callable[[], float] = time.time) -> None:
        self._files = [Path(file) for file in files]
        self._clock = clock
        self._ends_s = _UNREADABLE
        self._read_s = -_READ_AGAIN_S

    @property
    def days(self) -> float | None:
        """Days left; 0 or less if one has ended or cannot be read, None without certificates."""
        if not self._files:
            return None
        now_s = self._clock()
        if abs(now_s - self._read_s) >= _READ_AGAIN_S:
            self._ends_s, self._read_s = min(map(_usable_until_s, self._files)), now_s
        return max(0.0, (self._ends_s - now_s) / _DAY_S)
