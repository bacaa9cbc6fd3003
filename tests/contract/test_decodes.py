"""Choice of decoders: owners, spillover, joining, failures, and two orchestrators that decide as one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis.asyncio as redis

from quire.model.images import ImageEntry
from quire.model.nodes import DecoderInfo, Node
from quire_orchestrator.core.routing import Route, candidate
from quire_orchestrator.images import ImageDesk
from quire_server.clock import SystemClock
from quire_server.core.decoding import Candidate, Choice
from quire_server.core.placement import rendezvous
from quire_server.redis import RunningDecodes, scripts
from tests.polling import eventually


def _decoders(count: int, **about: Any) -> list[Node]:
    names = [f"decoder-{index}" for index in range(count)]
    return [Node(node_id=name, about=DecoderInfo(**about), grpc_address=f"{name}:1") for name in names]


def _desk(client: redis.Redis, decoders: list[Node], theta: int = 4, **decodes: int) -> ImageDesk:
    """The part of one orchestrator that routes."""
    running = RunningDecodes(client, **{"lasts_ms": 60_000, **decodes})
    unused: Any = None
    return ImageDesk(
        catalogue=unused, decodes=running, theta=theta, decoders=lambda: decoders, evict=unused, clock=SystemClock()
    )


def _image(number: int) -> ImageEntry:
    return ImageEntry(f"{number}", number.to_bytes(32, "big"), 1000, bytes(32), "", 64, 64)


async def _route(desk: ImageDesk, number: int, failed: tuple[str, ...] = ()) -> Route:
    route = await desk.route(_image(number), failed)
    assert route is not None
    return route


def _owned(decoders: list[Node], owner: int, count: int) -> list[int]:
    """Numbers of images whose owner is that decoder."""
    found = (n for n in range(10_000) if rendezvous(_image(n).record_name, decoders)[0] == decoders[owner])
    return [next(found) for _ in range(count)]


def test_a_decoder_that_leaves_moves_only_its_share() -> None:
    names = [b"%d" % number for number in range(2000)]
    before = {name: rendezvous(name, _decoders(5))[0].node_id for name in names}
    after = {name: rendezvous(name, _decoders(4))[0].node_id for name in names}
    moved = [name for name in names if before[name] != after[name]]
    assert all(before[name] == "decoder-4" for name in moved)
    assert 0.15 < len(moved) / len(names) < 0.25
    assert max(Counter(before.values()).values()) < 1.3 * len(names) / 5


async def test_above_theta_work_goes_to_the_least_busy_and_stays_the_owners(any_redis: redis.Redis) -> None:
    """Counted over two orchestrators, which take turns."""
    decoders = _decoders(3)
    desks = [_desk(any_redis, decoders, theta=2) for _ in range(2)]
    routes = [await _route(desks[at % 2], number) for at, number in enumerate(_owned(decoders, 0, 6))]
    assert all(route.owner == decoders[0] for route in routes)
    runners = Counter(route.runner.node_id for route in routes)
    assert runners["decoder-0"] == 3, "theta may wait there besides the one that runs"
    assert {runners["decoder-1"], runners["decoder-2"]} == {1, 2}


async def test_work_goes_only_to_decoders_of_the_owners_build(any_redis: redis.Redis) -> None:
    decoders = [*_decoders(2, build="new"), *_decoders(3, build="old")[2:]]
    desk = _desk(any_redis, decoders, theta=0)
    (first, second, third) = [await _route(desk, number) for number in _owned(decoders, 2, 3)]
    assert [first.runner, second.runner, third.runner] == 3 * [decoders[2]]
    assert desk.build == "old"


async def test_the_queue_that_a_decoder_reports_is_shared_by_its_devices(any_redis: redis.Redis) -> None:
    (busy,), (quick,) = _decoders(1, queued=9), _decoders(2, queued=9, devices=4)[1:]
    owner, spilled = await _route(_desk(any_redis, [busy, quick], theta=2), _owned([busy, quick], 0, 1)[0]), quick
    assert owner.owner == busy and owner.runner == spilled, "9 for one device are above 2, 9 for four are 2.25"
    at_home = await _route(_desk(any_redis, [busy, quick], theta=3), _owned([busy, quick], 1, 1)[0])
    assert at_home.owner == at_home.runner == quick


async def test_the_same_image_is_joined_where_it_runs(any_redis: redis.Redis) -> None:
    decoders = _decoders(3)
    one, other = _desk(any_redis, decoders, theta=0), _desk(any_redis, decoders, theta=0)
    first = await _route(one, 1)
    await _route(other, 2)
    again = [await _route(desk, 1) for desk in (one, other, other, one)]
    assert all(route.joined and route.runner == first.runner for route in again)
    for route in [first, *again]:
        await other.finish(route.ticket, failed=False)
    assert not (await _route(one, 1)).joined


_NO_JOIN = ("local joined = runner and 1 or 0", "runner = nil local joined = 0")


@pytest.mark.parametrize("fault", [None, _NO_JOIN], ids=["", "none is joined"])
async def test_orchestrators_asked_at_once_decode_an_image_once(
    any_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch, fault: tuple[str, str] | None
) -> None:
    """The owner is above theta: each orchestrator alone would choose another decoder every time."""
    if fault is not None:
        (old, new), part = fault, scripts.part
        assert old in part("decodes_route")
        monkeypatch.setattr(scripts, "part", lambda name: part(name).replace(old, new))
    decoders = _decoders(4)
    desks = [_desk(any_redis, decoders, theta=0) for _ in range(2)]
    for number in _owned(decoders, 0, 2):
        await _route(desks[0], number)
    barrier = asyncio.Barrier(8)

    async def ask(desk: ImageDesk) -> str:
        await barrier.wait()
        return (await _route(desk, _owned(decoders, 0, 3)[2])).runner.node_id

    runners = set(await asyncio.gather(*(ask(desks[at % 2]) for at in range(8))))
    assert (len(runners) == 1) == (fault is None), runners


async def test_failed_decoders_are_passed_over_for_a_while(any_redis: redis.Redis) -> None:
    decoders = _decoders(2)
    one, other = (_desk(any_redis, decoders, failed_ms=1_500) for _ in range(2))
    first = await _route(one, 1)
    await one.finish(first.ticket, failed=True)
    second = await _route(other, 1)
    assert second.runner != first.runner, "the other orchestrator knows of it"
    await other.finish(second.ticket, failed=False)
    both = await _route(one, 1, tuple(node.node_id for node in decoders))
    assert both.owner == rendezvous(_image(1).record_name, decoders)[0], "both have failed: as if none had"
    await one.finish(both.ticket, failed=False)
    assert await _desk(any_redis, []).route(_image(1)) is None

    async def usable_again() -> bool:
        route = await _route(other, 1)
        await other.finish(route.ticket, failed=False)
        return route.runner == first.runner

    await eventually(usable_again)


async def test_a_decode_at_a_failed_decoder_is_not_joined(any_redis: redis.Redis) -> None:
    decoders = _decoders(2)
    desk = _desk(any_redis, decoders)
    first = await _route(desk, 1)
    other = await _route(desk, 1, (first.runner.node_id,))
    assert other.runner != first.runner and not other.joined


async def test_what_is_counted_ends_by_itself(any_redis: redis.Redis) -> None:
    """No key is left for ever; and one orchestrator's shorter time does not end what another one counts."""
    decoders = _decoders(2)
    long, short = _desk(any_redis, decoders, lasts_ms=60_000), _desk(any_redis, decoders, lasts_ms=5_000)
    first, second = await _route(long, 1), await _route(short, 1)
    assert second.joined
    keys = [key async for key in any_redis.scan_iter("quire:{decodes}:*")]
    times: dict[str, int] = {key.decode(): await any_redis.pttl(key) for key in keys}
    assert len(times) == 4 and all(0 < time_ms <= 60_000 for time_ms in times.values()), times
    longest = [name for name, time_ms in times.items() if time_ms > 5_000]
    assert len(longest) == 3, "the record's, the decoder's, and the ticket of the one that lasts"
    for route in (first, second):
        await long.finish(route.ticket, failed=False)
    assert [key async for key in any_redis.scan_iter("quire:{decodes}:*")] == []


async def test_a_request_that_is_sent_again_counts_once(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver sends a script again if Redis' answer is lost."""
    monkeypatch.setattr("quire_server.redis.decodes.secrets.randbits", lambda bits: 7)
    running, candidates = RunningDecodes(redis_client, lasts_ms=60_000), list(map(candidate, _decoders(3)))
    choices = [await running.route(bytes(32), candidates, 4) for _ in range(2)]
    assert choices[0] == choices[1] and not choices[1].is_joined
    assert await redis_client.zcard(f"quire:{{decodes}}:decoder:{candidates[0].node_id}") == 1


async def test_a_request_that_is_given_up_is_not_counted(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis runs the script of a request that was cancelled all the same."""
    monkeypatch.setattr("quire_server.redis.decodes._LATE_S", 0.3)
    running, candidates = RunningDecodes(redis_client, lasts_ms=60_000), list(map(candidate, _decoders(1)))
    sent, script = asyncio.Event(), running._route

    async def held(**arguments: Any) -> Any:
        answer = await script(**arguments)
        sent.set()
        await asyncio.sleep(60)
        return answer

    monkeypatch.setattr(running, "_route", held)
    asking = asyncio.create_task(running.route(bytes(32), candidates, 4))
    await sent.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking

    async def none_counted() -> bool:
        count: Any = await redis_client.zcard("quire:{decodes}:decoder:decoder-0")
        return not count

    assert not await none_counted()
    await eventually(none_counted)


async def test_a_request_whose_orchestrator_died_counts_no_longer_than_it_may_last(any_redis: redis.Redis) -> None:
    decoders = _decoders(2)
    lost = await _route(_desk(any_redis, decoders, theta=0, lasts_ms=300), 1)
    desk = _desk(any_redis, decoders, theta=0)

    async def joined_no_more() -> bool:
        route = await _route(desk, 1)
        await desk.finish(route.ticket, failed=False)
        return not route.joined

    await eventually(joined_no_more)
    await desk.finish(lost.ticket, failed=False)  # unknown by now
    left: Any = await any_redis.zcard(f"quire:{{decodes}}:decoder:{lost.runner.node_id}")
    assert left == 0, "and the decoder counts as idle"


@dataclass
class _Model:
    """The same choice, without Redis and without time."""

    theta: int
    running: dict[int, tuple[bytes, str]] = field(default_factory=dict)

    def depth(self, one: Candidate) -> float:
        counted = sum(node == one.node_id for _, node in self.running.values())
        return max(counted, one.queued) / one.devices

    def route(self, record: bytes, candidates: list[Candidate]) -> tuple[int, bool]:
        names = [one.node_id for one in candidates]
        there = [names.index(node) for name, node in self.running.values() if name == record and node in names]
        if there:
            return there[0], True
        owner = candidates[0]
        if self.depth(owner) <= self.theta:
            return 0, False
        equal = [at for at, one in enumerate(candidates) if one.build == owner.build]
        return min(equal, key=lambda at: self.depth(candidates[at])), False


async def _differences(client: redis.Redis, seed: int, steps: int = 120) -> list[str]:
    """Run a random history of requests by two orchestrators; return the choices that are not the model's."""
    differences = []
    at_random = random.Random(seed)
    theta = at_random.randrange(4)
    model = _Model(theta)
    desks = [RunningDecodes(client, lasts_ms=600_000) for _ in range(2)]
    nodes = [
        Node(node_id=f"{seed}-{at}", about=DecoderInfo(build=at_random.choice("ab"), devices=at_random.randint(1, 3)))
        for at in range(5)
    ]
    for _ in range(steps):
        desk = at_random.choice(desks)
        if model.running and at_random.random() < 0.45:
            ticket = at_random.choice(list(model.running))
            del model.running[ticket]
            if not await desk.finish(ticket) or await desk.finish(ticket):
                differences.append(f"{ticket} was not ended once")
            continue
        record = bytes([seed, at_random.randrange(6)]).ljust(32)
        candidates = [candidate(node) for node in at_random.sample(nodes, at_random.randint(1, 5))]
        candidates = [one._replace(queued=at_random.randrange(3)) for one in candidates]
        choice: Choice = await desk.route(record, candidates, theta)
        expected, joined = model.route(record, candidates)
        running = [node for name, node in model.running.values() if name == record]
        is_right = candidates[choice.runner].node_id in running if joined else choice.runner == expected
        if choice.owner != 0 or choice.is_joined != joined or not is_right:
            differences.append(f"{choice}, not {expected}")
        model.running[choice.ticket] = record, candidates[choice.runner].node_id
    return differences


async def test_choices_are_those_of_a_model_without_redis(any_redis: redis.Redis) -> None:
    assert [await _differences(any_redis, seed) for seed in range(8)] == [[]] * 8


async def test_a_wrong_depth_is_seen_by_the_histories(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, old = scripts.part, "if other < least then"
    assert old in part("decodes_route")
    monkeypatch.setattr(scripts, "part", lambda name: part(name).replace(old, "if other <= least then"))
    assert any([await _differences(redis_client, seed) for seed in range(8)])
