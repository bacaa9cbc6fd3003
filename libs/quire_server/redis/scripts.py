"""Loads the Lua scripts that Redis runs: `lua/<area>_<name>.lua`, each behind the parts that it shares with others."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from typing import Final

from quire.model.policy import ENTRY_BYTES

_S3: Final = ("cbor_uint", "s3_entries")
_S3_VERSIONS: Final = (*_S3, "s3_versions")
_IMAGES: Final = ("cbor_uint", "images_count")
_EACH: Final = "index_each"
"""Behind a script, which it runs for one bucket after the other."""
_INDEX: Final = ("index_pages", "index_bucket", _EACH)
_SHARED: Final[dict[str, tuple[str, ...]]] = {
    "decodes_finish": (),
    "decodes_route": ("now_ms",),
    "images_charge": _IMAGES,
    "images_delete": _IMAGES,
    "images_put": _IMAGES,
    "images_refused": (),
    "images_release": (),
    "index_add_objects": _INDEX,
    "index_claim": _INDEX,
    "index_end_claim": (),
    "index_evict": _INDEX,
    "index_expect": _INDEX,
    "index_held": ("index_pages",),
    "index_holders": ("index_pages",),
    "index_join": _INDEX,
    "index_link": ("now_ms", *_INDEX),
    "index_link_of": ("index_pages",),
    "index_listings": (),
    "index_match": ("index_pages", "index_pinning"),
    "index_pin": ("index_pages", "index_there", "index_pinning"),
    "index_rebuilt": (),
    "index_register": ("now_ms", "index_pages", "index_bucket", "index_new_root", _EACH),
    "index_settle": (),
    "index_sole": ("index_pages",),
    "index_stored": (),
    "index_unlink": _INDEX,
    "index_unregister": _INDEX,
    "leader_hold": (),
    "leader_release": (),
    "membership_leave": (),
    "membership_live": (),
    "membership_renew": ("now_ms",),
    "membership_state": (),
    "membership_time": (),
    "reservations_add": ("now_ms",),
    "reservations_renew": ("now_ms",),
    "retained_forget": (),
    "retained_reserve": (),
    "s3_abort": _S3,
    "s3_charge": _S3,
    "s3_complete": _S3_VERSIONS,
    "s3_delete": _S3_VERSIONS,
    "s3_delete_version": _S3_VERSIONS,
    "s3_drop": _S3,
    "s3_get": _S3_VERSIONS,
    "s3_put": _S3_VERSIONS,
    "s3_put_part": _S3,
    "s3_removed": (),
    "s3_replace": (),
    "s3_set": (),
    "s3_start_upload": _S3,
    "s3_will_write": (),
}
"""The parts that each script shares with others."""
_ENTRY: Final = f"local ENTRY = {ENTRY_BYTES} -- bytes that an entry counts for, besides its own\n"


def script(name: str) -> str:
    """Return the source of a script with its shared parts.

    Raises:
        KeyError: No script has the name.
    """
    shared = _SHARED[name]
    shared_parts = _ENTRY if "cbor_uint" in shared else ""
    shared_parts += "".join(part(shared_name) for shared_name in shared if shared_name != _EACH)
    if _EACH in shared:
        return f"{shared_parts}local function change(ARGV)\n{part(name)}end\n{part(_EACH)}"
    return shared_parts + part(name)


def names(area: str) -> Iterable[str]:
    """Return the names of an area's scripts, without the area."""
    return (name.removeprefix(f"{area}_") for name in _SHARED if name.startswith(f"{area}_"))


def part(name: str) -> str:
    """Return the source of one file."""
    return (files("quire_server.redis") / "lua" / f"{name}.lua").read_text()
