"""Configuration from the environment: one frozen dataclass per service, every problem reported at once.

The variable of a field is the prefix and the field's name in capitals, e.g. `QUIRE_STORAGE_ARENA_BYTES`. An unknown
variable with Quire's prefix is a problem too: it is probably misspelt, and would have no effect. Each variable of a
service may be in a file instead, which the variable's name with `_FILE` names.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, TypeVar, get_type_hints

from quire.model.errors import ConfigInvalid
from quire.wire.addresses import host_and_port
from quire_server.variables import KNOWN


class _Config(Protocol):
    """A dataclass; what `load` can fill."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


Config = TypeVar("Config", bound=_Config)


_FILE: Final = "_FILE"
_FOREIGN: Final = re.compile(
    r"QUIRE_(TEST|CHAOS|SOAK|MUTATION|SIMULATION|EXPLORED)_"  # of this repository's tests
    r"|QUIRE_\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_TCP(_\w+)?)?)$"  # Kubernetes' own, of a service's name
)
_PUBLIC_SECRETS: Final = frozenset({"a-public-secret-for-trials-never-for-production"})
"""Secrets in the manifests of earlier releases."""
SECRET_BYTES_MIN: Final = 32
"""An access key and its secret are enough to try cluster secrets offline, so one that can be guessed is refused."""


def setting(
    default: Any,
    doc: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    variable: str | None = None,
    required: bool = False,
    bytes_min: int = 0,
    choices: Sequence[str] = (),
    folders: bool = False,
) -> Any:
    """A field of a configuration dataclass.

    `doc`: one sentence; `variable`: a name that services share; `bytes_min`: of a secret's text, which no problem
    repeats; `folders`: it names folders to write to, separated by commas.
    """
    metadata = {
        "doc": doc,
        "minimum": minimum,
        "maximum": maximum,
        "variable": variable,
        "required": required,
        "bytes_min": bytes_min,
        "choices": choices,
        "folders": folders,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Settings of every service."""

    metrics_listen: str = setting("", "host:port of the metrics for Prometheus, at /metrics; empty for none")
    cluster_ca: str = setting(
        "", "PEM of who signs members' certificates; empty: members talk without TLS", variable="QUIRE_CLUSTER_CA"
    )
    cluster_cert: str = setting("", "PEM of this member's certificate", variable="QUIRE_CLUSTER_CERT")
    cluster_key: str = setting("", "PEM of its private key", variable="QUIRE_CLUSTER_KEY")
    trace_recent: int = setting(
        0,
        "finished spans kept in memory for `quire trace --admin`, about 3 KB each; 0 for none",
        minimum=0,
        maximum=20_000,
        variable="QUIRE_TRACE_RECENT",
    )
    drain_s: float = setting(1.0, "time after SIGTERM for those who have not heard of it yet", minimum=0)

    @property
    def certificates(self) -> list[str]:
        """Files of certificates whose end is watched."""
        return [file for file in (self.cluster_ca, self.cluster_cert) if file]

    def problems(self) -> list[str]:
        """Return contradictions between the values."""
        return files_together(
            {
                "QUIRE_CLUSTER_CA": self.cluster_ca,
                "QUIRE_CLUSTER_CERT": self.cluster_cert,
                "QUIRE_CLUSTER_KEY": self.cluster_key,
            }
        )


@dataclasses.dataclass(frozen=True, slots=True)
class MemberConfig(ServiceConfig):
    """Settings of every member of a cluster."""

    cluster_secret: str = setting(
        "",
        "signs leases and permits; the same at every service, 32 bytes at least",
        variable="QUIRE_CLUSTER_SECRET",
        required=True,
        bytes_min=SECRET_BYTES_MIN,
    )
    cluster_secret_also: str = setting(
        "",
        "another secret that is believed, while one replaces the other",
        variable="QUIRE_CLUSTER_SECRET_ALSO",
        bytes_min=SECRET_BYTES_MIN,
    )

    accept_unproven: bool = setting(
        False,
        "take reports and calls of the release before (protocol 3), which prove nothing: while it is upgraded",
        variable="QUIRE_ACCEPT_UNPROVEN",
    )

    def problems(self) -> list[str]:
        problems = ServiceConfig.problems(self)
        names = [field.name for field in dataclasses.fields(self) if field.name.endswith("listen")]
        addresses = [str(getattr(self, name)) for name in names if name != "metrics_listen"]
        is_public = bool(_PUBLIC_SECRETS & {self.cluster_secret, self.cluster_secret_also})
        if is_public and any(map(beyond_loopback, addresses)):
            problems.append("QUIRE_CLUSTER_SECRET: this one is public; `openssl rand -hex 32` makes another one")
        return problems

    @property
    def secrets(self) -> tuple[bytes, ...]:
        """The one to sign with, and those to believe."""
        return tuple(secret.encode() for secret in (self.cluster_secret, self.cluster_secret_also) if secret)


def files_together(paths: Mapping[str, str]) -> list[str]:
    """All of them or none, and those that are named must be readable."""
    if not any(paths.values()):
        return []
    absent = [f"{name}: must be set, as {', '.join(paths)} belong together" for name, path in paths.items() if not path]
    unreadable = [
        f"{name}={path!r}: cannot be read" for name, path in paths.items() if path and not os.access(path, os.R_OK)
    ]
    return absent + unreadable


def variable_name(prefix: str, field: dataclasses.Field[Any]) -> str:
    """The environment variable of a setting: its own, or the service's prefix and its name."""
    return str(field.metadata.get("variable") or f"{prefix}{field.name.upper()}")


def load(kind: type[Config], prefix: str, environment: Mapping[str, str] | None = None) -> Config:
    """Fill `kind` from the environment. Raises `ConfigInvalid` with every variable that cannot be used."""
    config, problems = read(kind, prefix, environment)
    if problems:
        raise ConfigInvalid("; ".join(problems))
    return config


def read(kind: type[Config], prefix: str, environment: Mapping[str, str] | None = None) -> tuple[Config, list[str]]:
    """Load like `load`, but return the problems; an invalid value is replaced by its default."""
    source = os.environ if environment is None else environment
    hints, values, problems = get_type_hints(kind), {}, unknown_variables(source)
    for field in dataclasses.fields(kind):
        name = variable_name(prefix, field)
        try:
            text = value_of(name, source)
        except ConfigInvalid as error:
            problems.append(str(error))
            continue
        if not text:
            if field.metadata.get("required"):
                problems.append(f"{name}: must be set")
            continue
        if len(text.encode()) < field.metadata.get("bytes_min", 0):
            problems.append(
                f"{name}: shorter than {field.metadata['bytes_min']} bytes; `openssl rand -hex 32` makes one"
            )
        try:
            value = _parse(text, hints[field.name])
            if field.name.endswith("listen") and field.name != "listen" and value == "off":
                value = ""
            elif field.name.endswith("listen"):
                host_and_port(text)
        except ValueError as error:
            problems.append(f"{name}={text!r}: {error}")
            continue
        if (choices := field.metadata.get("choices")) and value not in choices:
            problems.append(f"{name}={text!r}: one of {', '.join(choices)}")
        minimum = field.metadata.get("minimum")
        if isinstance(value, float) and not math.isfinite(value):
            problems.append(f"{name}={text!r}: not a finite number")
        if minimum is not None and value < minimum:
            problems.append(f"{name}={text!r}: less than {minimum}")
        maximum = field.metadata.get("maximum")
        if maximum is not None and value > maximum:
            problems.append(f"{name}={text!r}: more than {maximum}")
        values[field.name] = value
    config = kind(**values)
    if isinstance(config, ServiceConfig):
        problems += config.problems() + _unadvertised(config, prefix)
    return config, problems


def value_of(name: str, source: Mapping[str, str]) -> str:
    """Return a variable's value, or the content of the file that its name with `_FILE` names; empty for neither.

    Raises `ConfigInvalid` for a file that cannot be read.
    """
    if (value := source.get(name, "")) or not (path := source.get(name + _FILE, "")):
        return value
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"{name}{_FILE}={path!r}: cannot be read: {error}") from None


def beyond_loopback(listen: str) -> bool:
    """Whether other hosts reach an address (host:port) that a service listens on."""
    if not listen:
        return False
    host, _ = host_and_port(listen)
    return host != "localhost" and not (host == "::1" or host.startswith("127."))


def unknown_variables(source: Mapping[str, str]) -> list[str]:
    """Problems: variables of the environment that nothing of Quire reads."""
    problems = []
    for name in sorted(source):
        if name.startswith("QUIRE_") and name.removesuffix(_FILE) not in KNOWN and not _FOREIGN.match(name):
            similar = difflib.get_close_matches(name, KNOWN, n=1)
            meant = f"; did you mean {similar[0]}?" if similar else ""
            problems.append(f"{name}={_shown(name, source[name])}: no such variable{meant}")
    return problems


def _unadvertised(config: ServiceConfig, prefix: str) -> list[str]:
    """A member that listens on every address needs one that others can reach."""
    listen = str(getattr(config, "listen", ""))
    if getattr(config, "advertise", None) != "" or host_and_port(listen)[0] not in ("", "0.0.0.0", "::"):
        return []
    return [f"{prefix}LISTEN={listen!r}: others cannot reach that address; set {prefix}ADVERTISE to one that they can"]


def _shown(name: str, value: str) -> str:
    return "***" if any(word in name for word in ("SECRET", "TOKEN", "PASSWORD", "KEY", "URL")) else repr(value)


def _parse(text: str, kind: Any) -> Any:
    if kind is bool:
        lowered = text.lower()
        if lowered not in ("1", "0", "true", "false", "yes", "no"):
            raise ValueError("not a yes or no")
        return lowered in ("1", "true", "yes")
    if kind is int:
        return int(text.replace("_", ""))
    if kind is float:
        return float(text)
    if kind is bytes:
        return text.encode()
    if kind is Path:
        return Path(text)
    return text
