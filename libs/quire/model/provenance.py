"""Provenance of images: the part of a C2PA manifest that the owner writes; decoders sign the images that they serve."""

from __future__ import annotations

import json
from typing import Final

from quire.model.errors import InvalidRequest

_BYTES_MAX: Final = 4096
GENERATED: Final = json.dumps(
    {
        "assertions": [
            {
                "label": "c2pa.actions.v2",
                "data": {
                    "actions": [
                        {
                            "action": "c2pa.created",
                            "digitalSourceType": (
                                "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
                            ),
                        }
                    ]
                },
            }
        ]
    },
    separators=(",", ":"),
)
"""That a model made it, and nothing else."""


def checked_provenance(text: str) -> str:
    """Provenance in ASCII without spaces; "" for none. Raises `InvalidRequest`.

    A JSON object with `assertions`, a list of {"label", "data"} as in a C2PA manifest, and optionally a `title`; 4 KiB.
    "generated" stands for `GENERATED`. Bindings to bytes (`c2pa.hash.*`) are the signer's, and refused.
    """
    if not text:
        return ""
    if text == "generated":
        return GENERATED
    if len(text.encode(errors="replace")) > _BYTES_MAX:
        raise InvalidRequest(f"{len(text)} characters, {_BYTES_MAX} bytes at most", field="provenance")
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"no JSON: {error}", field="provenance") from None
    if not isinstance(manifest, dict) or not manifest.keys() <= {"assertions", "title"}:
        raise InvalidRequest("an object with assertions, and a title if wanted, and nothing else", field="provenance")
    assertions = manifest.get("assertions")
    if not isinstance(assertions, list) or not assertions or not all(map(_is_assertion, assertions)):
        raise InvalidRequest('assertions: a list of {"label": …, "data": {…}}', field="provenance")
    if not isinstance(manifest.get("title", ""), str):
        raise InvalidRequest("the title is text", field="provenance")
    return json.dumps(manifest, ensure_ascii=True, separators=(",", ":"))


def _is_assertion(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != {"label", "data"}:
        return False
    label = value["label"]
    return (
        isinstance(label, str)
        and len(label) > 0
        and not label.startswith("c2pa.hash")
        and isinstance(value["data"], dict)
    )
