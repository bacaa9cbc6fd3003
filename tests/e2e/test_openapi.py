"""The images' HTTP interface is what its OpenAPI document says: schemathesis sends valid and invalid requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
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
_OPERATIONS: Final = [
    (method.upper(), path)
    for path, operations in json.loads(_DOCUMENT.read_text())["paths"].items()
    for method in operations
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with LocalCluster(tmp_path_factory.mktemp("openapi"), decoders=1) as cluster:
        yield f"http://{cluster.http_address}"


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), _OPERATIONS)
def test_requests_are_answered_as_documented(url: str, method: str, path: str, mode: GenerationMode) -> None:
    """500 is not documented, so that an unexpected error fails the test."""
    operation = schemathesis.openapi.from_path(_DOCUMENT)[path][method]
    if mode is GenerationMode.NEGATIVE and not operation.query.items and not operation.body:
        return  # nothing in it can be invalid
    requests: Any = operation.as_strategy(generation_mode=mode)

    @settings(
        max_examples=_REQUESTS, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(case=requests)
    def conforms(case: Any) -> None:
        case.call_and_validate(base_url=url, checks=_CHECKS, timeout=60)

    conforms()
