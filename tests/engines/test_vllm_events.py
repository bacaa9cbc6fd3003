"""KV events of real vLLM with the connector: routers learn which blocks Quire has acknowledged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire_tools.engines.models import make_model
from quire_tools.local import LocalCluster
from tests.engines.engine import BLOCK, PROMPT, Engine, engine
from tests.polling import until

WHOLE = len(PROMPT) // BLOCK * BLOCK


def _with_events() -> dict[str, Any]:
    from vllm.config import KVEventsConfig

    return {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}


def _recorded(quire: Engine) -> list[Any]:
    """Record the events that vLLM takes with its steps."""
    events: list[Any] = []
    take = quire.scheduler.take_events

    def recorded() -> list[Any]:
        taken: list[Any] = take()
        events.extend(taken)
        return taken

    quire.scheduler.take_events = recorded
    return events


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_each_acknowledged_block_has_an_event_under_its_hash(
    engine_cluster: LocalCluster, tmp_path: Path, family: str
) -> None:
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    model = make_model(tmp_path / "model", family=family)
    with engine(model, engine_cluster.gateway_address, **_with_events()) as quire:
        events, hashes = _recorded(quire), list[Any]()
        arrived = quire.scheduler.on_new_request

        def arrive(request: Any) -> None:
            if not hashes:
                hashes.extend(maybe_convert_block_hash(block) for block in request.block_hashes)
            arrived(request)

        quire.scheduler.on_new_request = arrive
        quire.tokens(PROMPT)
        groups = len(quire.scheduler._groups)

        def there() -> bool:
            quire.tokens([7] * 8, 1)  # vLLM takes events with a step
            return sum(len(event.block_hashes) for event in events) >= groups * WHOLE // BLOCK

        until(there, "all blocks have an event")
        for group in range(groups):
            own = [event for event in events if event.group_idx == group]
            assert [block for event in own for block in event.block_hashes] == hashes
            assert [token for event in own for token in event.token_ids] == PROMPT[:WHOLE]
            ends = [None, *(event.block_hashes[-1] for event in own[:-1])]
            assert [event.parent_block_hash for event in own] == ends
            assert {(event.medium, event.locality, event.block_size) for event in own} == {("STORAGE", "REMOTE", BLOCK)}
        count = len(events)
        quire.forget()
        quire.tokens(PROMPT)
        quire.tokens([7] * 8, 1)
        assert len(events) == count, "what Quire has is not stored again"


def test_without_vllms_setting_there_are_none(tiny_model: Path, engine_cluster: LocalCluster) -> None:
    with engine(tiny_model, engine_cluster.gateway_address) as quire:
        events = _recorded(quire)
        quire.tokens(PROMPT)
        until(lambda: quire.figures().get("stored_blocks", 0) > 0, "blocks stored")
        quire.tokens([7] * 8, 1)
        assert not events and not quire.scheduler.take_events()
