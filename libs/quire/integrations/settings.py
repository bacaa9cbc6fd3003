"""User settings of an integration: names and types are checked, so that a misspelt one is not ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, TypeVar

from quire.model.durability import Durability
from quire.model.errors import ConfigInvalid

Made = TypeVar("Made")
LEVELS: Final = tuple(level.name.lower() for level in Durability)


def read_settings(kind: type[Made], settings: Mapping[str, Any], flag: str) -> Made:
    """A dataclass of str, bool, int and float. Raises `ConfigInvalid`, naming `flag` and the setting."""
    types = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    for name, value in settings.items():
        if name not in types:
            raise ConfigInvalid(f"means nothing; there are {', '.join(types)}", field=f"{flag}.{name}")
        expected = {"str": str, "bool": bool, "int": int, "float": (int, float)}[str(types[name])]
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):  # type: ignore[arg-type]
            raise ConfigInvalid(f"{value!r} is no {types[name]}", field=f"{flag}.{name}")
    return kind(**settings)


def check_common(settings: Any, flag: str) -> None:
    """Settings of all integrations: `gateway`, `durability`, `staging_bytes`, `tenant_salt` and times in seconds.

    Raises `ConfigInvalid`.
    """
    if not settings.gateway:
        raise ConfigInvalid("there is none; give HOST:PORT of Quire's gateway", field=f"{flag}.gateway")
    if settings.durability not in LEVELS:
        raise ConfigInvalid(f"{settings.durability!r}; {', '.join(LEVELS)}", field=f"{flag}.durability")
    for name in ("lookup_timeout_s", "timeout_s", "away_s"):
        if not getattr(settings, name) > 0:
            raise ConfigInvalid(f"{getattr(settings, name)} is not positive", field=f"{flag}.{name}")
    if settings.staging_bytes < 0:
        raise ConfigInvalid(f"{settings.staging_bytes} is negative", field=f"{flag}.staging_bytes")
    try:
        bytes.fromhex(settings.tenant_salt)
    except ValueError:
        raise ConfigInvalid("not hexadecimal", field=f"{flag}.tenant_salt") from None
