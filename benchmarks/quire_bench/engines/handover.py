"""A prefill engine and a decode engine, against one engine for both.

Real vLLM on the CPU, three processes, a model of random weights. Every prompt is new. The cores are shared: while one
engine computes the others are idle.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from rich.progress import track

from quire.model.errors import InvalidRequest
from quire_tools.cli.options import Json, Plot
from quire_tools.engines.models import make_model
from quire_tools.engines.process import EngineProcess, engine_process
from quire_tools.engines.vllm import BLOCK, require_vllm
from quire_tools.local import LocalCluster
from quire_tools.report import Report, Row, median, spread

_HEAD: Final = 64
_ANSWER: Final = 8
_DECODE_ELSEWHERE: Final = {"do_remote_decode": True, "do_remote_prefill": False}


def run(tokens: int, prompts: int, layers: int, hidden: int, step_tokens: int) -> Report:
    """Measure.

    Raises:
        InvalidRequest: vLLM is not installed, or an answer differs from that of one engine.
    """
    baseline = {"name": f"one vLLM {require_vllm()} that computes and decodes, same run", "unit": "ms"}
    report = Report("handover", baseline, tall=True)
    heads = hidden // _HEAD
    kv_heads = max(1, heads // 4)
    room = 4 * tokens * layers * 2 * kv_heads * _HEAD * 4
    settings: dict[str, Any] = {"max_model_len": tokens + 2 * BLOCK, "kv_cache_memory_bytes": max(64 << 20, room)}
    if step_tokens:
        settings["max_num_batched_tokens"] = step_tokens
    with tempfile.TemporaryDirectory(prefix="quire-handover-") as name, ExitStack() as stack:
        folder = Path(name)
        model = make_model(folder / "model", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads)
        cluster = stack.enter_context(LocalCluster(folder / "cluster", arena_bytes=max(256 << 20, prompts * room)))
        roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
        engines = {
            role: stack.enter_context(
                engine_process(role, model, folder / role, gateway=cluster.gateway_address, kv_role=kv_role, **settings)
            )
            for role, kv_role in roles.items()
        }
        single = stack.enter_context(engine_process("single", model, folder / "single", **settings))
        for engine in (*engines.values(), single):
            engine.ready()
        report.rows += _measure(single, engines["prefill"], engines["decode"], tokens, prompts)
    report.notes.append(
        f"{prompts} prompts of {tokens} tokens, computed {step_tokens or tokens} at a time, {layers} layers of width "
        f"{hidden}; the first one does not count"
    )
    report.notes.append(
        "hand-over: from the prefill engine's answer to the decode engine's first token; a block may be left to compute"
    )
    return report


def _measure(
    single: EngineProcess, prefill: EngineProcess, decode: EngineProcess, tokens: int, prompts: int
) -> list[Row]:
    draw = np.random.default_rng(11)
    alone, steps, firsts, handovers, at_once, overlapped = (list[float]() for _ in range(6))
    for number in track(range(prompts + 1), "prompts", transient=True):
        prompt = draw.integers(2, 258, tokens).tolist()
        first = single.ask(prompt)
        cached, answer = single.ask(prompt), single.ask(prompt, _ANSWER)
        computed = prefill.ask(prompt, parameters=_DECODE_ELSEWHERE)
        decoded = decode.ask(prompt, parameters=computed.parameters)
        decoded_answer = decode.ask(prompt, _ANSWER)
        if decoded.tokens != first.tokens or decoded_answer.tokens != answer.tokens:
            raise InvalidRequest("other tokens than one engine has", field="engine")
        if number:
            alone.append(first.took_s)
            steps.append((answer.took_s - cached.took_s) / (_ANSWER - 1))
            firsts.append(computed.took_s + decoded.took_s)
            handovers.append(decoded.took_s)
            first_s, behind_s = _at_once(prefill, decode, draw.integers(2, 258, tokens).tolist())
            at_once.append(first_s)
            overlapped.append(behind_s)
    rows = []
    for name, ours, base in (
        ("time to first token, one engine after the other", firsts, alone),
        ("time to first token, both asked at once", at_once, alone),
        ("hand-over, one engine after the other, against a step", handovers, steps),
        ("hand-over, both asked at once, against a step", overlapped, steps),
    ):
        measured = {"ms": median(ours) * 1e3, "spread": spread(ours)}
        rows.append(Row({"what": name}, measured, median(base) * 1e3, median(ours) / median(base)))
    return rows


def _at_once(prefill: EngineProcess, decode: EngineProcess, prompt: list[int]) -> tuple[float, float]:
    """Send a request to both engines at once; return the seconds until the decode engine's first token.

    The second value is the part of it behind the prefill engine's answer.
    """
    with ThreadPoolExecutor(1) as threads:
        computing = threads.submit(prefill.ask, prompt, parameters=_DECODE_ELSEWHERE)
        decoded = decode.ask(prompt, parameters={"do_remote_prefill": True})
        computed = computing.result()
    if computed.tokens != decoded.tokens:
        raise InvalidRequest("other tokens than the prefill engine has", field="engine")
    return decoded.took_s, decoded.took_s - computed.took_s


def command(
    tokens: Annotated[int, typer.Option(help="of each prompt")] = 2048,
    prompts: Annotated[int, typer.Option(help="how many")] = 8,
    layers: Annotated[int, typer.Option(help="of the model of random weights")] = 8,
    hidden: Annotated[int, typer.Option(help="its width; heads of 64")] = 512,
    step_tokens: Annotated[int, typer.Option(help="that an engine computes at a time; 0: a prompt at once")] = 0,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Time to first token where one vLLM computes a prompt and another one decodes, against one that does both."""
    if not 2 * BLOCK <= tokens <= 4000 or hidden % 256 or min(prompts, layers, hidden) < 1 or step_tokens < 0:
        raise InvalidRequest(f"{tokens}, {prompts}, {layers}, {hidden}", field="tokens, …, hidden")
    run(tokens, prompts, layers, hidden, step_tokens).show(json_file, plot)
