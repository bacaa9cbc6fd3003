"""The router in front of engines that fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from functools import partial
from typing import Any

import pytest
from yarl import URL

from quire.model.errors import ConfigInvalid
from quire_tools.router.choice import Candidate
from quire_tools.router.disaggregation import PrefillLost, prefilling
from quire_tools.router.engine import EngineLost, RoutedEngine
from quire_tools.router.prompts import Prompt
from quire_tools.router.requests import read_request
from quire_tools.router.settings import EngineAddress, EngineRole, RouterSettings, addresses
from tests.polling import eventually
from tests.unit.router.fake_engines import MODEL, FakeEngine, Fault, routed, until, was_tried

BEFORE_FIRST_TOKEN = [Fault.REFUSES, Fault.BREAKS, Fault.HANGS]


@pytest.mark.parametrize(
    ("fault", "stream"),
    [
        *((fault, stream) for fault in (*BEFORE_FIRST_TOKEN, Fault.BUSY) for stream in (False, True)),
        (Fault.ERROR_EVENT, True),
    ],
)
async def test_another_engine_answers_when_one_fails_before_its_first_token(fault: Fault, stream: bool) -> None:
    async with (
        FakeEngine("bad").run() as bad,
        FakeEngine("good").run() as good,
        routed([bad, good]) as (router, client),
    ):
        bad.fault = fault
        answers = [
            await client.ask(f"prompt {number}", stream=stream)
            async for number in until(partial(was_tried, router, bad))
        ]
        assert {(status, engine) for status, engine, _ in answers} == {(200, good.url)}
        if stream:
            assert all(text.endswith("data: [DONE]\n\n") and text.count('"good"') == 4 for *_, text in answers)


async def test_an_engine_that_fails_in_the_middle_ends_the_stream_with_an_error() -> None:
    async with FakeEngine("one", Fault.BREAKS_LATER).run() as one, routed([one]) as (_, client):
        status, _, text = await client.ask(stream=True)
        events = [json.loads(line[6:]) for line in text.splitlines() if line]
        assert status == 200 and [event["choices"][0]["text"] for event in events[:-1]] == ["one", "one"]
        assert events[-1]["error"]["code"] == 502 and "[DONE]" not in text


async def test_errors_of_the_request_are_passed_on() -> None:
    async with FakeEngine("one").run() as one, FakeEngine("two").run() as two, routed([one, two]) as (_, client):
        for engine in (one, two):
            engine.fault = Fault.BUSY
        status, _, text = await client.ask()
        assert status == 429 and json.loads(text)["error"]["message"] in ("one", "two")
        assert len(one.asked) + len(two.asked) == 2


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"kv_transfer_params": {"quire": {"retain_s": -1}}}, 400, "kv_transfer_params.quire.retain_s"),
        ({"kv_transfer_params": {"quire": {"retain": 1}}}, 400, "kv_transfer_params.quire.retain"),
        ({"kv_transfer_params": {"quire": 3}}, 400, "kv_transfer_params.quire"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, 400, "kv_transfer_params.do_remote_prefill"),
        ({"kv_transfer_params": []}, 400, "kv_transfer_params"),
        ({"model": "another"}, 404, "model"),
    ],
)
async def test_invalid_requests_name_the_field(body: dict[str, Any], status: int, field: str) -> None:
    async with FakeEngine("one").run() as one, routed([one]) as (_, client):
        answered, _, text = await client.ask(**body)
        assert (answered, json.loads(text)["error"]["param"]) == (status, field)
        assert not one.asked


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
async def test_bodies_that_are_no_objects(raw: bytes) -> None:
    async with (
        FakeEngine("one").run() as one,
        routed([one]) as (_, client),
        client.session.post("/v1/completions", data=raw) as answer,
    ):
        assert answer.status == 400 and (await answer.json())["error"]["type"] == "invalid_request_error"


async def test_a_dead_engine_comes_back() -> None:
    one = FakeEngine("one")
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(contextlib.AsyncExitStack())
        await running.enter_async_context(one.run())
        router, client = await stack.enter_async_context(routed([one]))
        await running.aclose()
        status, _, text = await client.ask()
        assert status == 503 and "engine" in json.loads(text)["error"]["message"]
        async with client.session.get("/readyz") as answer:
            async with asyncio.timeout(10):
                while answer.status == 200:
                    answer = await client.session.get("/readyz")
        async with one.run():
            async with asyncio.timeout(10):
                while not router.engines[0].is_up:
                    await asyncio.sleep(0.01)
            assert (await client.ask())[0] == 200


async def test_requests_go_to_the_engine_with_the_shorter_queue() -> None:
    gate = asyncio.Event()
    async with (
        FakeEngine("one", answers_after=gate).run() as one,
        FakeEngine("two", answers_after=gate).run() as two,
        routed([one, two]) as (router, client),
    ):
        asking = [asyncio.create_task(client.ask("x" * 1000, stream=True)) for _ in range(6)]
        async with asyncio.timeout(10):
            while len(one.asked) + len(two.asked) < 6:
                await asyncio.sleep(0.01)
        assert len(one.asked) == len(two.asked) == 3
        assert [engine.queued_tokens for engine in router.engines] == [3000, 3000]
        gate.set()
        await asyncio.gather(*asking)
        assert [engine.queued_tokens for engine in router.engines] == [0, 0]
        assert [engine.requests for engine in router.engines] == [0, 0]


async def test_prompts_with_one_beginning_go_to_one_engine() -> None:
    async with FakeEngine("one").run() as one, FakeEngine("two").run() as two, routed([one, two]) as (router, client):
        places: dict[int, set[str]] = {}

        def both_were_asked() -> bool:
            return set().union(*places.values()) == {one.url, two.url}

        async for begin in until(both_were_asked):
            for number in range(3):
                for engine in router.engines:
                    engine.measured_tokens_per_s = 1000.0  # those of the fakes are noise
                places.setdefault(begin, set()).add((await client.ask(f"{begin:03}" * 22 + str(number)))[1])
        assert all(len(urls) == 1 for urls in places.values()), places


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_ends_the_request_at_the_engine(stream: bool) -> None:
    gate = asyncio.Event()
    async with FakeEngine("one", answers_after=gate).run() as one, routed([one]) as (router, client):
        asking = asyncio.create_task(client.ask(stream=stream))
        async with asyncio.timeout(10):
            while not one.asked:
                await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            while not one.cancelled:
                await asyncio.sleep(0.01)
            while router.engines[0].requests:
                await asyncio.sleep(0.01)
        assert router.engines[0].queued_tokens == 0


async def test_a_prefill_engine_is_asked_at_the_same_time() -> None:
    described = _description()
    async with (
        FakeEngine("prefill", description=described, answers_after=asyncio.Event()).run() as prefill,
        FakeEngine("decode", description=described).run() as decode,
        routed(prefill=[prefill], decode=[decode]) as (_, client),
    ):
        hints = {"quire": {"retain_s": 5}}
        status, engine, _ = await client.ask("p" * 300, stream=True, max_tokens=7, kv_transfer_params=hints)
        assert (status, engine) == (200, decode.url)
        (first,), (second,) = prefill.asked, decode.asked
        assert first["max_tokens"] == 1 and "stream" not in first and first["kv_transfer_params"]["do_remote_decode"]
        assert "quire" not in first["kv_transfer_params"]
        assert second["max_tokens"] == 7 and second["stream"]
        assert second["kv_transfer_params"] == {"do_remote_prefill": True, "do_remote_decode": False, **hints}
        async with asyncio.timeout(10):
            while not prefill.cancelled:  # nobody needs it any more
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("fault", BEFORE_FIRST_TOKEN)
async def test_another_prefill_engine_takes_over(fault: Fault) -> None:
    described, gate = _description(), asyncio.Event()
    async with (
        FakeEngine("one", description=described).run() as one,
        FakeEngine("two", description=described).run() as two,
        FakeEngine("decode", description=described, answers_after=gate).run() as decode,
        routed(prefill=[one, two], decode=[decode]) as (router, client),
    ):
        one.fault = fault
        async for number in until(partial(was_tried, router, one)):
            gate.clear()
            before, answered = len(two.asked), len(decode.asked)
            asking = asyncio.create_task(client.ask(f"{number}" * 300))
            async with asyncio.timeout(10):
                while len(two.asked) == before:
                    await asyncio.sleep(0.01)
            gate.set()
            assert (await asking)[:2] == (200, decode.url)
            assert len(decode.asked) == answered + 1, "the decode engine noticed nothing"


def _was_asked(engine: FakeEngine, requests: int) -> bool:
    return len(engine.asked) >= requests


@pytest.mark.parametrize("fault", BEFORE_FIRST_TOKEN)
async def test_a_prompt_is_computed_once_whichever_decode_engine_answers(fault: Fault) -> None:
    described = _description()
    async with (
        FakeEngine("prefill", description=described, answers_after=asyncio.Event()).run() as prefill,
        FakeEngine("one", description=described).run() as faulty,
        FakeEngine("two", description=described).run() as sound,
        routed(prefill=[prefill], decode=[faulty, sound]) as (router, client),
    ):
        faulty.fault = fault
        async for number in until(partial(was_tried, router, faulty)):
            sound.answers_after = asyncio.Event()
            answer = asyncio.create_task(client.ask(f"{number}" * 300, stream=True))
            await eventually(partial(_was_asked, prefill, number + 1), "the prompt is computed")
            sound.answers_after.set()
            assert (await answer)[:2] == (200, sound.url) and len(prefill.asked) == number + 1
        assert all(body["kv_transfer_params"]["do_remote_prefill"] for body in sound.asked)


@pytest.mark.parametrize("fault", BEFORE_FIRST_TOKEN)
async def test_without_a_prefill_engine_the_decode_engine_computes(fault: Fault) -> None:
    described, gate = _description(), asyncio.Event()
    async with (
        FakeEngine("prefill", description=described).run() as prefill,
        FakeEngine("decode", description=described, answers_after=gate).run() as decode,
        routed(prefill=[prefill], decode=[decode]) as (_, client),
    ):
        prefill.fault = fault
        asking = asyncio.create_task(client.ask("p" * 300))
        async with asyncio.timeout(10):
            while len(decode.asked) < 2:
                await asyncio.sleep(0.01)
        gate.set()
        assert (await asking)[:2] == (200, decode.url)
        assert "kv_transfer_params" not in decode.asked[1] and decode.cancelled == 1


async def test_engines_whose_blocks_have_other_names_do_not_work_together() -> None:
    async with (
        FakeEngine("prefill", description=_description("1")).run() as prefill,
        FakeEngine("decode", description=_description("2")).run() as decode,
        routed(prefill=[prefill], decode=[decode]) as (_, client),
    ):
        assert (await client.ask("p" * 300))[:2] == (200, decode.url)
        assert not prefill.asked and "kv_transfer_params" not in decode.asked[0]


@pytest.mark.parametrize("body", [{"prompt": ["a" * 300, "b" * 300]}, {"echo": True}, {"prompt": "short"}])
async def test_prompts_that_are_not_handed_over(body: dict[str, Any]) -> None:
    async with (
        FakeEngine("prefill", description=_description()).run() as prefill,
        FakeEngine("decode", description=_description()).run() as decode,
        routed(prefill=[prefill], decode=[decode], prefill_tokens_min=100) as (_, client),
    ):
        assert (await client.ask(**{"prompt": "p" * 300, **body}))[:2] == (200, decode.url)
        assert not prefill.asked


async def test_other_paths_models_and_metrics() -> None:
    async with (
        FakeEngine("one", models=["a"]).run() as one,
        FakeEngine("two", models=["b"]).run() as two,
        routed([one, two]) as (_, client),
    ):
        async with client.session.post("/v1/embeddings", json={"model": "b", "input": "x"}) as answer:
            assert await answer.json() == {"from": "two"}
        async with client.session.get("/v1/models") as answer:
            assert [record["id"] for record in (await answer.json())["data"]] == ["a", "b"]
        async with client.session.get("/metrics") as answer:
            assert answer.status == 200
        for path in ("/healthz", "/readyz", "/health"):
            async with client.session.get(path) as answer:
                assert answer.status == 200


async def test_a_request_may_name_no_model() -> None:
    async with (
        FakeEngine("one").run() as one,
        routed([one]) as (_, client),
        client.session.post("/v1/completions", json={"prompt": [1, 2]}) as answer,
    ):
        assert answer.status == 200


async def test_an_engine_that_is_stopping_finishes_its_requests() -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    async with (
        FakeEngine("one", answers_after=gates[0]).run() as one,
        FakeEngine("two", answers_after=gates[1]).run() as two,
        routed([one, two]) as (router, client),
    ):
        asking = asyncio.create_task(client.ask(stream=True))
        async with asyncio.timeout(60):
            while not one.asked and not two.asked:
                await asyncio.sleep(0.01)
            first, second = (0, 1) if one.asked else (1, 0)
            stopping, other = (one, two)[first], (one, two)[second]
            stopping.fault = Fault.DRAINS
            while router.engines[first].is_up:
                await asyncio.sleep(0.01)
            down_s, probes = time.monotonic(), stopping.probes
            while time.monotonic() - down_s < 0.5 or stopping.probes < probes + 3:  # longer than `down_after_s`
                await asyncio.sleep(0.01)
            gates[second].set()
            assert (await client.ask("another"))[1] == other.url
            gates[first].set()
            status, engine, text = await asking
        assert (status, engine) == (200, stopping.url) and text.endswith("data: [DONE]\n\n")


async def test_a_list_of_models_that_fails_once_costs_nothing() -> None:
    async with FakeEngine("one", models_fail=1).run() as one, routed([one]) as (router, client):
        assert (await client.ask())[0] == 200
        engine = router.engines[0]
        one.models_fail = 1
        assert not await router._health._learn(engine), "it failed"
        assert (await client.ask())[0] == 200


@pytest.mark.parametrize("description", [[], None, {"quire_blocks": {"hash_tokens": 1e999}}, "text", 7])
async def test_an_engine_may_describe_itself_in_any_way(description: Any) -> None:
    async with FakeEngine("one", description=description).run() as one:
        one.description = None  # so that nobody waits for it
        async with routed([one]) as (router, client):
            one.description = description
            await router._health._learn(router.engines[0])
            assert (await client.ask())[0] == 200 and router.engines[0].naming is None


async def test_probes_go_on_while_an_engine_is_described() -> None:
    async with FakeEngine("one", description_hangs=True).run() as one, routed([one]) as (router, client):
        assert (await client.ask())[0] == 200
        one.fault = Fault.HANGS
        async with asyncio.timeout(10):
            while router.engines[0].is_up:
                await asyncio.sleep(0.01)


async def test_failing_requests_do_not_flood_an_engine_with_probes() -> None:
    async with FakeEngine("one").run() as one, routed([one], health_s=0.2) as (_, client):
        one.fault = Fault.REFUSES
        before = one.probes
        async with asyncio.timeout(10):
            for _ in range(100):
                await client.ask()
        assert one.probes - before < 20


@pytest.mark.parametrize("path", ["/v1/../health", "/v1/%2e%2e/health", "/v1/a/%2E%2e/../health", "/v1/./x"])
async def test_no_path_leaves_the_api(path: str) -> None:
    async with FakeEngine("one").run() as one, routed([one]) as (_, client):
        url = URL(f"http://{client.session._base_url.authority}{path}", encoded=True)  # type: ignore[union-attr]
        async with client.session.get(url) as answer:
            assert answer.status == 404 and "X-Quire-Engine" not in answer.headers


async def test_bodies_that_cannot_be_read() -> None:
    deep = b'{"prompt": "x", "tools": ' + b"[" * 970 + b"]" * 970 + b"}"
    async with FakeEngine("one").run() as one, routed([one]) as (_, client):
        garbage = {"Content-Encoding": "gzip"}
        async with client.session.post("/v1/completions", data=b"garbage", headers=garbage) as answer:
            assert answer.status == 400
        for levels, status in ((100, 200), (300, 400), (970, 400), (100_000, 400)):
            body = deep.replace(b"[" * 970, b"[" * levels).replace(b"]" * 970, b"]" * levels)
            async with client.session.post("/v1/completions", data=body) as answer:
                assert answer.status == status
        text = json.dumps({"prompt": "[" * 1000 + '"{'}).encode()
        async with client.session.post("/v1/completions", data=text) as answer:
            assert answer.status == 200, "brackets of a text are no levels"


async def test_cookies_of_one_client_are_not_for_the_next() -> None:
    async with FakeEngine("one").run() as one, routed([one]) as (_, client):
        for _ in range(2):
            await client.ask()
        assert one.cookies == ["", ""]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", ["", "mine", "x" * 100, "\xe9"])
async def test_a_request_has_one_name(given: str, stream: bool) -> None:
    """The client's, or one of the router; at the engine and in the answer."""
    async with (
        FakeEngine("one").run() as one,
        routed([one]) as (_, client),
        client.session.post(
            "/v1/completions", json={"prompt": [1], "stream": stream}, headers={"X-Request-Id": given}
        ) as answer,
    ):
        name = answer.headers["X-Request-Id"]
        assert [name] == one.request_ids and name and (name == given[:64] or not given.isascii() or not given)


async def test_another_engine_tokenizes_when_one_hangs() -> None:
    async with (
        FakeEngine("one").run() as one,
        FakeEngine("two").run() as two,
        routed([one, two]) as (router, _),
    ):
        one.tokenizes = False
        request = read_request("/v1/completions", b'{"prompt": "abc"}', {})
        prompt = await router._forwarding._tokenizer.prompt_of(request, router.engines)
        assert prompt.tokens == [97, 98, 99]


def test_only_prompts_whose_cached_part_is_known_measure_the_rate() -> None:
    for events, is_stream, measured in (("tcp://a:1", True, True), ("tcp://a:1", False, False), ("", True, False)):
        engine = RoutedEngine(EngineAddress(url="http://a:1", role=EngineRole.BOTH, events=events), 10.0)
        with engine.request(5000) as queued:
            if is_stream:
                queued.first_token()
            else:
                queued.end()
            assert engine.queued_tokens == 0
        assert (engine.measured_tokens_per_s > 0) == measured and engine.requests == 0


@pytest.mark.parametrize("turns", range(12))
async def test_a_prefill_engine_that_fails_with_the_first_token_changes_nothing(turns: int) -> None:
    """Whichever comes first, in the same turn of the loop: never a loss behind the first token."""
    engine = RoutedEngine(EngineAddress(url="http://a:1", role=EngineRole.PREFILL), 10.0)
    engine.is_up = True

    async def fail(engine: RoutedEngine, body: bytes) -> None:
        for _ in range(4):
            await asyncio.sleep(0)
        raise EngineLost(engine, "it failed")

    request = read_request("/v1/completions", b'{"prompt": "abc"}', {})
    candidates = [Candidate(engine=engine, cached_tokens=0, tokens_per_s=1.0)]
    answered = False
    try:
        async with prefilling(request, Prompt(tokens=(), length=3), candidates, fail) as has_answered:
            for _ in range(turns):
                await asyncio.sleep(0)
            answered = True
            has_answered()
            for _ in range(20):
                await asyncio.sleep(0)
    except PrefillLost:
        assert not answered
    assert engine.queued_tokens == engine.requests == 0


@pytest.mark.parametrize(
    ("engines", "prefill", "decode"),
    [
        ((), (), ()),
        (("http://a:1", "http://a:1"), (), ()),
        (("http://a:1",), ("http://b:1",), ()),
        ((), ("http://b:1",), ()),
        (("a:1",), (), ()),
        (("http://a:1/v1",), (), ()),
        (("http://a:1,zone=x",), (), ()),
        (("http://user:password@a:1",), (), ()),
        (("http://a:1?x=1",), (), ()),
    ],
)
def test_settings_that_do_not_fit(engines: Any, prefill: Any, decode: Any) -> None:
    with pytest.raises(ConfigInvalid):
        RouterSettings(listen="127.0.0.1:1", engines=addresses(engines, prefill, decode))


def _description(weights: str = "w") -> dict[str, Any]:
    return {
        "quire_names": weights,
        "quire_blocks": {
            "namespace": {
                "model_id": MODEL,
                "weight_version": weights,
                "tenant_salt_hex": "",
                "adapter": "",
                "num_layers": 2,
                "chunk_tokens": 16,
                "kv_heads": 1,
                "head_dim": 8,
                "dtype": "fp16",
                "attention": "kv_heads",
            },
            "hash_tokens": 16,
            "block_tokens": 16,
            "parent": "00" * 32,
        },
    }
