"""Real engines on this machine's CPU; skipped where they are not installed (`make test-engines` installs them)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire_tools.engines.models import make_model
from quire_tools.engines.vllm import prepare
from quire_tools.local import LocalCluster

prepare()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say once, and in words, why nothing runs."""
    try:
        import vllm  # noqa: F401
    except ImportError:
        reason = "vLLM is not installed here: `make test-engines` installs it in an environment of its own"
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights with a tokenizer of bytes."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine_cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster of one storage node, for tests that break it as they like."""
    with LocalCluster(tmp_path / "cluster", arena_bytes=128 << 20, drive_bytes=128 << 20) as cluster:
        yield cluster
