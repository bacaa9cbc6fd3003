"""The policies by name."""

from __future__ import annotations

from typing import Final

from quire.model.errors import ConfigInvalid
from quire_scheduler.core.adaptive import Adaptive
from quire_scheduler.core.policies import BwProp, Equal, KvProp, StallOpt
from quire_scheduler.core.policy import Policy

POLICIES: Final = ("equal", "kv-prop", "bw-prop", "stall-opt", "calibrated", "adaptive")


def make_policy(name: str, margin: float) -> Policy:
    """`margin`: δ in bytes per second (Eq. 7). Raises `ConfigInvalid` for a name that is not in `POLICIES`."""
    match name:
        case "equal":
            return Equal()
        case "kv-prop":
            return KvProp()
        case "bw-prop":
            return BwProp()
        case "stall-opt":
            return StallOpt()
        case "calibrated":
            return StallOpt(margin)
        case "adaptive":
            return Adaptive(margin)
    raise ConfigInvalid(f"{name!r} is no policy; there are {', '.join(POLICIES)}", field="policy")
