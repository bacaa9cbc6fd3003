"""The images' HTTP interface is what its OpenAPI document says: schemathesis sends valid and invalid requests."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from quire_tools.local import LocalCluster

_DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "reference" / "openapi.json"
_CHECKS: Final = [
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
]
_REQUESTS: Final = 20


def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(_DOCUMENT.read_text())
    return document


def _operations(*, fallible: bool = False) -> list[tuple[str, str]]:
    """Return method and path of each operation. `fallible`: of those that have a query or a body to be invalid."""
    return [
        (method.upper(), path)
        for path, operations in _document()["paths"].items()
        for method, about in operations.items()
        if not fallible
        or "requestBody" in about
        or any(parameter["in"] == "query" for parameter in about["parameters"])
    ]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with LocalCluster(tmp_path_factory.mktemp("openapi"), decoders=1) as cluster:
        yield f"http://{cluster.http_address}"


def _conforms(url: str, document: dict[str, Any], method: str, path: str, mode: GenerationMode) -> None:
    """Send requests of an operation. Raises schemathesis' failures for answers that the document does not have."""
    requests: Any = schemathesis.openapi.from_dict(document)[path][method].as_strategy(generation_mode=mode)

    @settings(
        max_examples=_REQUESTS, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(case=requests)
    def conforms(case: Any) -> None:
        case.call_and_validate(base_url=url, checks=_CHECKS, timeout=60)

    conforms()


def test_the_gateway_serves_the_document(url: str) -> None:
    """The document needs no credentials, because programs generate clients from it."""
    with urllib.request.urlopen(f"{url}/v1/openapi.json", timeout=30) as answer:
        assert answer.headers["Content-Type"] == "application/json"
        assert answer.read() == _DOCUMENT.read_bytes()


@pytest.mark.parametrize(("method", "path"), _operations())
def test_valid_requests_are_answered_as_documented(url: str, method: str, path: str) -> None:
    """500 is not documented, so that an unexpected error fails the test."""
    _conforms(url, _document(), method, path, GenerationMode.POSITIVE)


@pytest.mark.parametrize(("method", "path"), _operations(fallible=True))
def test_invalid_requests_are_answered_as_documented(url: str, method: str, path: str) -> None:
    _conforms(url, _document(), method, path, GenerationMode.NEGATIVE)


def test_an_undocumented_answer_fails(url: str) -> None:
    """The fault put back: a document without the answer for an image that is not there."""
    document = _document()
    del document["paths"]["/v1/images/{id}"]["delete"]["responses"]["404"]
    with pytest.raises(FailureGroup, match="Undocumented status code"):
        _conforms(url, document, "DELETE", "/v1/images/{id}", GenerationMode.POSITIVE)
