"""Metrics about the process itself: its build, and when its certificates expire."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from opentelemetry.metrics import CallbackOptions, Observation

from quire import PROTOCOL_VERSION, __version__
from quire.telemetry import meter, names

_UNREADABLE: Final = 0.0


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
    try:
        return min(
            certificate.not_valid_after_utc.timestamp()
            for certificate in x509.load_pem_x509_certificates(file.read_bytes())
        )
    except (OSError, ValueError):
        return _UNREADABLE
