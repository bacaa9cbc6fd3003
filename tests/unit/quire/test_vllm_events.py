"""Events of stores: one for each that all workers have acknowledged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from quire.integrations.vllm.groups import Group, Kind
from quire.integrations.vllm.plan import StoredRun, StorePlan, Unstored
from quire.integrations.vllm.scheduler.events import StoreEvents
from tests.unit.quire.vllm_scheduler import GROUP, SPACE, Request, close_clients

SHARDS = tuple(replace(SPACE, shard_index=shard, shard_count=2) for shard in range(2))
STATE = Group(1, ("state",), Kind.STATE, 32, 8192)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_clients()


def _request() -> Any:
    request: Any = Request()
    request.all_token_ids = list(range(133))
    return request


def _plan(first: int, *blocks: int, group: int = 0, state: int | None = None, spaces: Any = SHARDS) -> StorePlan:
    about: dict[str, Any] = {"request_id": "r", "namespaces": spaces, "keys": (), "known": 0}
    return StorePlan(group=group, first=first, blocks=blocks, state=state, **about)


def test_an_event_waits_for_all_workers() -> None:
    events, request = StoreEvents(32), _request()
    events.planned(request, GROUP, _plan(1, 12, 13))
    events.stored(StoredRun(request_id="r", group=0, first=1))
    assert events.take() == []
    events.stored(StoredRun(request_id="r", group=0, first=1))
    (event,) = events.take()
    assert (event.hashes, event.parent) == (request.block_hashes[1:3], request.block_hashes[0])
    assert event.tokens == list(range(32, 96)) and event.lora_name is None
    assert events.take() == []


def test_one_copy_of_latents_is_one_report() -> None:
    events = StoreEvents(32)
    events.planned(_request(), GROUP, _plan(0, 11, spaces=(SPACE, SPACE)))
    events.stored(StoredRun(request_id="r", group=0, first=0))
    (event,) = events.take()
    assert event.parent is None


def test_a_store_that_failed_in_one_worker_has_no_event() -> None:
    events = StoreEvents(32)
    events.planned(_request(), GROUP, _plan(0, 11))
    events.stored(StoredRun(request_id="r", group=0, first=0))
    events.unstored(Unstored(request_id="r", group=0, first=0, later=False))
    events.stored(StoredRun(request_id="r", group=0, first=0))
    assert events.take() == []


def test_a_state_has_the_hash_of_its_block() -> None:
    events, request = StoreEvents(32), _request()
    events.planned(request, STATE, _plan(0, 23, group=1, state=2, spaces=(SPACE,)))
    events.stored(StoredRun(request_id="r", group=1, first=0, state=2))
    (event,) = events.take()
    assert event.hashes == request.block_hashes[2:3] and event.tokens == list(range(64, 96))
