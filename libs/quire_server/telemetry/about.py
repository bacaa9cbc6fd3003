"""What a process is, and until when its certificates are good, as metrics."""

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
    """`quire_build_info`: 1, with what this process is made of as labels."""
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
    """When each of these certificates (PEM; of a chain the first to go) is good no more, seconds since the Unix epoch;
    0 for a file that cannot be read.
    """

    def observe(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(expiry_s(file), {"file": str(file)}) for file in files]

    meter().create_observable_gauge(names.CERTIFICATE_EXPIRY, [observe], "s", "when certificates end, Unix time")


def expiry_s(file: Path) -> float:
    """Of the first certificate in a file to end, Unix time; 0 for a file without any."""
    try:
        return min(each.not_valid_after_utc.timestamp() for each in x509.load_pem_x509_certificates(file.read_bytes()))
    except (OSError, ValueError):
        return _UNREADABLE
