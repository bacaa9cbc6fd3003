"""Where images are decoded: owners, spillover, joining, and what moves when decoders come and go."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from quire.model.nodes import DecoderInfo, Node
from quire_orchestrator.core.routing import ImageRouter


def _decoders(count: int) -> list[Node]:
    names = [f"decoder-{index}" for index in range(count)]
    return [Node(node_id=name, about=DecoderInfo(), grpc_address=f"{name}:1") for name in names]


def _owner(router: ImageRouter, name: bytes, decoders: list[Node]) -> str:
    route = router.route(name, decoders, 0.0)
    assert route is not None
    router.finish(route.ticket)
    return route.owner.node_id


def test_a_decoder_that_leaves_moves_only_its_share() -> None:
    router, names = ImageRouter(4, 60.0), [b"%d" % number for number in range(2000)]
    before = {name: _owner(router, name, _decoders(5)) for name in names}
    after = {name: _owner(router, name, _decoders(4)) for name in names}
    moved = [name for name in names if before[name] != after[name]]
    assert all(before[name] == "decoder-4" for name in moved)
    assert 0.15 < len(moved) / len(names) < 0.25
    assert max(Counter(before.values()).values()) < 1.3 * len(names) / 5


def test_above_theta_work_goes_to_the_least_busy_and_stays_the_owners() -> None:
    router, decoders = ImageRouter(2, 60.0), _decoders(3)
    every = [b"%d" % number for number in range(200)]
    owned = [name for name in every if _owner(router, name, decoders) == "decoder-0"]
    routes = [router.route(name, decoders, 1.0) for name in owned[:6]]
    assert all(route is not None and route.owner.node_id == "decoder-0" for route in routes)
    runners = Counter(route.runner.node_id for route in routes if route is not None)
    assert runners["decoder-0"] == 3, "theta may wait there besides the one that runs"
    assert router.spilled == 3
    assert {runners["decoder-1"], runners["decoder-2"]} == {1, 2}


def test_the_queue_that_a_decoder_reports_is_shared_by_its_devices() -> None:
    """Other orchestrators send requests too: a decoder's own count is believed where it is more."""
    about = [DecoderInfo(queued=9), DecoderInfo(queued=9, devices=4), DecoderInfo(queued=1)]
    busy, quick, idle = (replace(node, about=info) for node, info in zip(_decoders(3), about, strict=True))
    router = ImageRouter(2, 60.0)
    assert [router.depth(node) for node in (busy, quick, idle)] == [9, 9 / 4, 1]
    owned = next(
        name for name in (b"%d" % number for number in range(200)) if _owner(router, name, _decoders(3)) == busy.node_id
    )
    route = router.route(owned, [busy, quick, idle], 1.0)
    assert route is not None and route.runner == idle and route.owner == busy


def test_the_same_id_is_joined_where_it_runs() -> None:
    router, decoders = ImageRouter(0, 60.0), _decoders(3)
    first = router.route(b"x", decoders, 1.0)
    assert first is not None
    router.route(b"y", decoders, 1.0)
    again = [router.route(b"x", decoders, 1.0) for _ in range(5)]
    assert all(route is not None and route.joined and route.runner == first.runner for route in again)
    assert router.joined == 5
    for route in [first, *again]:
        assert route is not None
        assert router.finish(route.ticket)
    later = router.route(b"x", decoders, 1.0)
    assert later is not None
    assert not later.joined


def test_failed_decoders_are_avoided_and_silence_runs_out() -> None:
    router, decoders = ImageRouter(4, 10.0), _decoders(2)
    first = router.route(b"x", decoders, 1.0)
    assert first is not None
    assert router.finish(first.ticket, failed_at_s=1.0)
    other = router.route(b"x", decoders, 1.1)
    assert other is not None
    assert other.runner != first.runner
    assert router.finish(other.ticket, failed_at_s=1.2)
    assert router.route(b"x", decoders, 1.3) is not None, "both have failed: better one of them than none"
    assert router.route(b"x", [], 1.0) is None
    later = router.route(b"y", decoders, 9.0)
    assert later is not None
    assert sum(map(router.depth, decoders)) == 2
    router.route(b"z", decoders, 20.0)
    assert sum(map(router.depth, decoders)) == 1, "tickets that were not given back are gone"
    assert not router.finish(first.ticket)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 3)), max_size=80), st.integers(0, 3))
def test_depths_are_what_runs(events: list[tuple[bool, int, int]], theta: int) -> None:
    router, decoders, running = ImageRouter(theta, 1e9), _decoders(3), []
    for start, name, at in events:
        if start:
            route = router.route(b"%d" % name, decoders, 0.0)
            assert route is not None
            running.append(route)
        elif running:
            assert router.finish(running.pop(at % len(running)).ticket)
        counts = Counter(route.runner.node_id for route in running)
        for node in decoders:
            assert router.depth(node) == counts[node.node_id]
