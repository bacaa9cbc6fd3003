"""User settings, in `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from quire.integrations.settings import check_common, read_settings
from quire.model.durability import Durability
from quire.model.errors import ConfigInvalid

LOADS: Final = ("auto", "layerwise", "async")
ZERO_COPY: Final = ("async", "always", "never")
STORES: Final = ("all", "reused", "never")
_FLAG: Final = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the connector; an invalid value raises `ConfigInvalid`, naming the setting.

    `gateway`: host:port. `load`: "layerwise" computes the first layers while later ones arrive, "async" lets other
    requests compute while all arrive; "auto" is async: with it vLLM uses no block before all of it is there.
    `zero_copy`: which loads storage nodes write straight into vLLM's blocks; others are staged and copied, which lets a
    load be given up at once while a silent node may still write: a direct one waits for it. `durability`: of stored
    chunks. `store`: "all" that this engine computes, "reused" blocks, which it sees a second time, or "never".
    `store_output`: also what it generates. `staging_bytes`: registered memory for stores and staged loads, 0 for twice
    what a step can compute, or the longest request has, at most an eighth of the machine's; what finds no room is
    stored later, while its request runs. `lookup_timeout_s`: for how long a request waits for a look-up. `away_s`: for
    how long Quire is left alone after it did not answer. `handover_s`: for how long a request waits for blocks that
    another engine has computed for it. `cut_off`: compute what would come later than computing it. `model`, `weights`:
    name them; empty for the folder's name and the digest of its weights. `tenant_salt`: hexadecimal. `allow_failing`:
    accept vLLM's `kv_load_failure_policy=fail`.
    """

    gateway: str = ""
    load: str = "auto"
    zero_copy: str = "never"
    durability: str = "memory"
    store: str = "all"
    store_output: bool = True
    staging_bytes: int = 0
    lookup_timeout_s: float = 1.0
    timeout_s: float = 20.0
    away_s: float = 2.0
    handover_s: float = 5.0
    cut_off: bool = True
    model: str = ""
    weights: str = ""
    tenant_salt: str = ""
    token: str = ""
    zone: str = ""
    allow_failing: bool = False

    def __post_init__(self) -> None:
        check_common(self, _FLAG)
        if not 0 <= self.handover_s < inf:
            raise ConfigInvalid(f"{self.handover_s} is no time", field=f"{_FLAG}.handover_s")
        for name, allowed in (("load", LOADS), ("zero_copy", ZERO_COPY), ("store", STORES)):
            if getattr(self, name) not in allowed:
                raise ConfigInvalid(f"{getattr(self, name)!r}; {', '.join(allowed)}", field=f"{_FLAG}.{name}")

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> Settings:
        """Read the settings. Raises `ConfigInvalid` for an unknown one."""
        return read_settings(cls, extra, _FLAG)

    def direct(self, asynchronous: bool) -> bool:
        """Return whether loads may be written straight into vLLM's blocks.

        A layerwise one then has vLLM wait for a silent node.
        """
        return self.zero_copy == "always" or (self.zero_copy == "async" and asynchronous)

    @property
    def level(self) -> Durability:
        """`durability` as the SDK has it."""
        return Durability[self.durability.upper()]
