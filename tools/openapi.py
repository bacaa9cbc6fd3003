"""The OpenAPI document of the images' HTTP interface, from its routes, parameters and errors."""

from __future__ import annotations

import inspect
import json
import re
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, Final

from quire.model.durability import Durability
from quire.model.fitting import Fit, Gravity
from quire.model.images import MEDIA_TYPES
from quire.model.pictures import READ_FORMATS
from quire_gateway.http.frontend import ImagesFrontend
from quire_gateway.http.latent_puts import OF_A_PUT
from quire_gateway.http.parameters import OF_A_GET
from tools.interfaces import http_routes

Schema = dict[str, Any]
_TEXT: Final[Schema] = {"type": "string"}
_SIZE: Final[Schema] = {"type": "integer", "minimum": 0}
_FLAG: Final[Schema] = {"type": "string", "enum": ["0", "1", "true", "false"]}
_BYTES: Final[Schema] = {"type": "string", "format": "binary"}
_PUT: Final[dict[str, Schema]] = {
    "durability": {"type": "string", "enum": [level.name.lower() for level in Durability]},
    "shape": {"type": "string", "pattern": r"^[0-9]+,[0-9]+,[0-9]+$"},
    "dtype": {"type": "string", "enum": ["float16", "bfloat16", "float32"]},
    "height": _SIZE,
    "width": _SIZE,
    "vae_scale_factor": {"type": "integer", "minimum": 1},
    "scaling_factor": {"type": "number"},
    "shift_factor": {"type": "number"},
    "do_scaling": _FLAG,
    "vae": _TEXT,
    "revision": _TEXT,
    "weights_sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    "allow_unknown_vae": _FLAG,
    "ttl": _SIZE,
    "background": {"type": "string", "pattern": "^[0-9A-Fa-f]{6}$"},
}
_GET: Final[dict[str, Schema]] = {
    "format": {"type": "string", "enum": [*MEDIA_TYPES, "jpg"]},
    "quality": {"type": "integer", "minimum": 0, "maximum": 100},
    "width": _SIZE,
    "height": _SIZE,
    "fit": {"type": "string", "enum": [fit.value for fit in Fit]},
    "gravity": {"type": "string", "enum": [gravity.value for gravity in Gravity]},
    "enlarge": _FLAG,
    "dpr": {"type": "number", "exclusiveMinimum": 0, "maximum": 8},
    "preset": _TEXT,
}
_ENTRY: Final[Schema] = {
    "type": "object",
    "required": ["id", "version", "bytes", "height", "width", "created_ms", "expires_ms", "metadata"],
    "properties": {
        "id": _TEXT,
        "version": _TEXT,
        "bytes": _SIZE,
        "height": _SIZE,
        "width": _SIZE,
        "created_ms": _SIZE,
        "expires_ms": {"type": ["integer", "null"]},
        "metadata": {"type": "object", "additionalProperties": _TEXT},
    },
}
_PROBLEM: Final[Schema] = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "code", "request_id"],
    "properties": {
        "type": _TEXT,
        "title": _TEXT,
        "status": {"type": "integer"},
        "detail": _TEXT,
        "code": _TEXT,
        "field": _TEXT,
        "request_id": _TEXT,
    },
}
_STORED: Final[Schema] = {
    "type": "object",
    "required": ["id", "version", "latent_sha256", "record_bytes"],
    "properties": {
        "id": _TEXT,
        "version": _TEXT,
        "latent_sha256": _TEXT,
        "record_bytes": _SIZE,
        "fidelity": {
            "type": "object",
            "properties": {"psnr_db": {"type": ["number", "null"]}, "error_max": {"type": "number"}},
        },
        "first_of_several": {"type": "boolean"},
    },
}
_PUT_TYPES: Final = (
    "application/octet-stream",
    "application/vnd.safetensors",
    "application/x-quire-latent",
    *(f"image/{name}" for name in READ_FORMATS),
)
_IDS: Final[Schema] = {"type": "array", "items": _TEXT}
_ALWAYS: Final = (400, 401, 403, 413, 429, 503, 504)
_BODIES: Final[dict[str, dict[str, Schema]]] = {
    "_put": dict.fromkeys(_PUT_TYPES, _BYTES),
    "_delete_all": {
        "application/json": {
            "type": "object",
            "required": ["delete"],
            "additionalProperties": False,
            "properties": {"delete": {**_IDS, "minItems": 1, "maxItems": 1000}},
        }
    },
}
_ANSWERS: Final[dict[str, tuple[int, dict[str, Schema], tuple[int, ...]]]] = {
    "_health": (200, {"application/json": {"type": "object", "required": ["status"]}}, ()),
    "_put": (201, {"application/json": _STORED}, (404, 409, 412, 415, 501, 507)),
    "_get": (200, dict.fromkeys(MEDIA_TYPES.values(), _BYTES), (404, 406, 412, 416)),
    "_delete": (204, {}, (404,)),
    "_list": (
        200,
        {
            "application/json": {
                "type": "object",
                "required": ["images", "next"],
                "properties": {
                    "images": {"type": "array", "items": {"$ref": "#/components/schemas/Image"}},
                    "next": {"type": ["string", "null"]},
                },
            }
        },
        (),
    ),
    "_delete_all": (
        200,
        {
            "application/json": {
                "type": "object",
                "required": ["deleted", "missing"],
                "properties": {"deleted": _IDS, "missing": _IDS},
            }
        },
        (),
    ),
    "_latent": (200, {"application/x-quire-latent": _BYTES}, (404,)),
    "_openapi": (200, {"application/json": {"type": "object", "required": ["openapi"]}}, ()),
    "_known_vaes": (200, {"application/json": {"type": "object", "required": ["vaes", "digest"]}}, ()),
}
_QUERIES: Final[dict[str, dict[str, Schema]]] = {
    "_put": {name: _PUT[name] for name in OF_A_PUT},
    "_get": {name: _GET[name] for name in OF_A_GET} | {"v": {"type": "string", "minLength": 1}},
    "_list": {"prefix": _TEXT, "after": _TEXT, "limit": {"type": "integer", "minimum": 1, "maximum": 1000}},
}


def document() -> str:
    """Return the document as JSON. Raises `KeyError` for an undescribed route or parameter."""
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler in http_routes():
        paths.setdefault(path, {})[method.lower()] = _operation(path, handler)
    described = {
        "openapi": "3.1.0",
        "info": {"title": "Quire: images as latents", "version": version("quire"), "license": {"name": "Apache-2.0"}},
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": {"Image": _ENTRY, "Problem": _PROBLEM},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "NAME:SECRET"}},
        },
    }
    return json.dumps(described, indent=2) + "\n"


def _operation(path: str, handler: str) -> dict[str, Any]:
    status, content, errors = _ANSWERS[handler]
    about = re.sub(r"\s+", " ", inspect.getdoc(getattr(ImagesFrontend, handler)) or "")
    parameters = [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in _QUERIES.get(handler, {}).items()
    ]
    if "{id}" in path:
        about_id = {"type": "string", "minLength": 1, "maxLength": 512}
        parameters.insert(0, {"name": "id", "in": "path", "required": True, "schema": about_id})
    answers: dict[str, Any] = {str(status): {"description": HTTPStatus(status).phrase, "content": _content(content)}}
    if handler == "_get":
        answers["304"] = {"description": HTTPStatus(304).phrase}
        answers["206"] = answers["200"] | {"description": HTTPStatus(206).phrase}
    problem = {"application/problem+json": {"$ref": "#/components/schemas/Problem"}}
    for code in (*_ALWAYS, *errors):
        answers[str(code)] = {"description": HTTPStatus(code).phrase, "content": _content(problem)}
    described: dict[str, Any] = {
        "operationId": handler.lstrip("_"),
        "summary": about.split(". ")[0].rstrip("."),
        "parameters": parameters,
        "responses": dict(sorted(answers.items())),
    }
    if handler in _BODIES:
        described["requestBody"] = {"required": True, "content": _content(_BODIES[handler])}
    return described


def _content(schemas: dict[str, Schema]) -> dict[str, Any]:
    return {kind: {"schema": schema} for kind, schema in schemas.items()}
