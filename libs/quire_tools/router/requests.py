"""An OpenAI request, as far as routing needs to understand it, and errors in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from quire.integrations.hints import HINTS, read_hints

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
REQUEST_ID: Final = web.RequestKey("request_id", str)
REQUEST_ID_HEADER: Final = "X-Request-Id"
_PARAMETERS: Final = "kv_transfer_params"
_LEVELS_MAX: Final = 200
"""Of nested arrays and objects: Python's encoder and decoder recurse."""
_TOKEN_MAX: Final = (1 << 32) - 1
_ROLES: Final = ("do_remote_prefill", "do_remote_decode")
_COMPUTED_WHOLE: Final = ("echo", "prompt_logprobs")
"""Fields of requests for which the engine that answers computes the whole prompt itself."""


class RequestError(Exception):
    """A request that the router answers itself.

    Args:
        status: HTTP status.
        message: The fault, and what to do about it.
        field: Name of the field; empty for none.
        retry_after_s: When to try again; 0 for unknown.
    """

    def __init__(self, status: int, message: str, field: str = "", retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.retry_after_s = status, message, field, retry_after_s

    def response(self) -> web.Response:
        """Return the answer."""
        headers = {"Retry-After": str(self.retry_after_s)} if self.retry_after_s else {}
        return web.json_response(self.body(), status=self.status, headers=headers)

    def body(self) -> dict[str, Any]:
        """Return the answer's JSON, as OpenAI's clients read it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.field or None, "code": self.status}}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for a completion.

    Attributes:
        path: Of the engine's server.
        body: Its JSON.
        raw: The same as bytes.
        headers: Of the client.
        hints: For Quire.
    """

    path: str
    body: Mapping[str, Any]
    raw: bytes
    headers: Mapping[str, str]
    hints: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """Name of the model; empty for the engine's own."""
        return str(self.body.get("model") or "")

    @property
    def cache_salt(self) -> str:
        """Salt of the names of its blocks; empty for none."""
        return str(self.body.get("cache_salt") or "")

    @property
    def can_be_handed_over(self) -> bool:
        """Whether one engine may compute the prompt, and another one answer."""
        prompt = self.body.get("prompt")
        is_batch = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        return not is_batch and not any(self.body.get(name) for name in _COMPUTED_WHOLE)

    def with_parameters(self, parameters: Mapping[str, Any], **changes: Any) -> bytes:
        """Return the body as bytes, with other `kv_transfer_params` and fields; None drops a field."""
        body = {**self.body, _PARAMETERS: parameters, **changes}
        return json.dumps({name: value for name, value in body.items() if value is not None}).encode()


def read_request(path: str, raw: bytes, headers: Mapping[str, str]) -> GenerationRequest:
    """Read a request.

    Raises:
        RequestError: It is no JSON object, or its hints are invalid.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is no JSON, or nested too deeply: {error}") from None
    if not isinstance(body, dict):
        raise RequestError(400, "the body is no JSON object")
    if _is_nested_deeply(body):
        raise RequestError(400, f"the body has more than {_LEVELS_MAX} levels")
    parameters = body.get(_PARAMETERS)
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(400, "is no JSON object", _PARAMETERS)
    for name in parameters or {}:
        if name in _ROLES:
            raise RequestError(400, "is set by the router", f"{_PARAMETERS}.{name}")
    _, invalid = read_hints(parameters)
    for name, value in invalid.items():
        raise RequestError(400, f"{value!r} is not valid, or the field means nothing", f"{_PARAMETERS}.{name}")
    return GenerationRequest(path=path, body=body, raw=raw, headers=headers, hints=(parameters or {}).get(HINTS, {}))


def _is_nested_deeply(value: object) -> bool:
    """Return whether a JSON value has too many levels; without recursion."""
    level: list[Any] = [value]
    for _ in range(_LEVELS_MAX):
        members = (value.values() if isinstance(value, dict) else value for value in level)
        level = [inner for values in members for inner in values if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def token_prompt(request: GenerationRequest) -> Sequence[int] | None:
    """Return the prompt of a request that gives tokens; None for one that gives text."""
    prompt = request.body.get("prompt") if request.path == COMPLETIONS else None
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    return tokens_of(prompt)


def tokens_of(value: Any) -> Sequence[int] | None:
    """Return a JSON value that is a list of tokens; None for another one, also an empty one."""
    is_tokens = isinstance(value, list) and all(type(token) is int and 0 <= token <= _TOKEN_MAX for token in value)
    return value if is_tokens and value else None
