"""Settings of the router, and addresses of engines as users write them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final
from urllib.parse import urlsplit

from quire.model.errors import ConfigInvalid

_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_FIELDS: Final = ("host", "events")


class EngineRole(Enum):
    """Part of an engine in answering requests."""

    BOTH = "engine"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """An engine, as the user gave it.

    Attributes:
        url: Of its HTTP server, without a path.
        role: Its part in answering requests.
        host: Its machine, as the storage node there calls it; empty for unknown.
        events: ZMQ address of its KV events; empty for none.
    """

    url: str
    role: EngineRole
    host: str = ""
    events: str = ""

    @classmethod
    def parse(cls, text: str, role: EngineRole) -> EngineAddress:
        """Parse `URL[,host=NAME][,events=tcp://HOST:PORT]`. Raises `ConfigInvalid`."""
        url, *parts = text.split(",")
        address = urlsplit(url)
        is_place = address.scheme in ("http", "https") and address.hostname and address.path in ("", "/")
        if not is_place or address.query or address.fragment or "@" in address.netloc:
            raise ConfigInvalid(f"{url!r}; give http://HOST:PORT", field=role.value)
        values = dict(part.partition("=")[::2] for part in parts)
        if unknown := [name for name in values if name not in _FIELDS]:
            raise ConfigInvalid(f"{unknown[0]!r} means nothing; there are {', '.join(_FIELDS)}", field=role.value)
        host = values.get("host", socket.gethostname() if address.hostname in _LOOPBACK else "")
        return cls(url=url.rstrip("/"), role=role, host=host, events=values.get("events", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Settings of a router.

    Attributes:
        listen: host:port to serve at.
        engines: The engines: of one role each, or some for prefill and some for decode.
        gateway: host:port of Quire's gateway; empty to route without Quire.
        token: For the gateway.
        tenant_salt: As the engines have it.
        engine_key: API key for the router's own requests to engines; empty for none.
        retries: How many further engines are tried before the first token.
        health_s: Seconds between two looks at an engine.
        down_after_s: Seconds without a sign of life after which an engine loses its requests, and receives no others.
        prefill_tokens_min: Tokens left to compute below which a decode engine computes a prompt itself.
        tokens_per_s: Prefill rate of an engine that has not been measured.
        assign_s: How long a decision of Quire is waited for.
        grace_s: How long requests may take to end when the router stops.
    """

    listen: str
    engines: Sequence[EngineAddress]
    gateway: str = ""
    token: str = ""
    tenant_salt: bytes = b""
    engine_key: str = ""
    retries: int = 2
    health_s: float = 2.0
    down_after_s: float = 10.0
    prefill_tokens_min: int = 256
    tokens_per_s: float = 4000.0
    assign_s: float = 0.5
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        """Check that the engines fit together, and that times are positive. Raises `ConfigInvalid`."""
        urls = [engine.url for engine in self.engines]
        if not urls:
            raise ConfigInvalid("there is none; give --engine, or --prefill and --decode", field="engine")
        if len(set(urls)) < len(urls):
            raise ConfigInvalid("an engine is given twice", field="engine")
        if {engine.role for engine in self.engines} not in ({EngineRole.BOTH}, {EngineRole.PREFILL, EngineRole.DECODE}):
            raise ConfigInvalid("give either --engine alone, or both --prefill and --decode", field="engine")
        for name in ("health_s", "down_after_s", "tokens_per_s", "assign_s"):
            if not getattr(self, name) > 0:
                raise ConfigInvalid(f"{getattr(self, name)} is not positive", field=name)
        for name in ("retries", "prefill_tokens_min", "grace_s"):
            if getattr(self, name) < 0:
                raise ConfigInvalid(f"{getattr(self, name)} is negative", field=name)


def addresses(engines: Sequence[str], prefill: Sequence[str], decode: Sequence[str]) -> list[EngineAddress]:
    """Parse the addresses of engines, by their roles. Raises `ConfigInvalid`."""
    roles = (EngineRole.BOTH, engines), (EngineRole.PREFILL, prefill), (EngineRole.DECODE, decode)
    return [EngineAddress.parse(text, role) for role, texts in roles for text in texts]
