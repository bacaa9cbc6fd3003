"""Commands of `quire bench` whose modules hold no command of their own."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from quire.model.errors import InvalidRequest
from quire_tools.cli.options import Json, Plot, numbers


def bench_lookup(
    context: Annotated[int, typer.Option(help="tokens of the prompt")] = 65_536,
    chunk_tokens: Annotated[int, typer.Option(help="tokens of a chunk")] = 16,
    rounds: Annotated[int, typer.Option(help="rounds of each measurement")] = 200,
    clients: Annotated[int, typer.Option(help="clients at the same time")] = 16,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Longest match at the client, leased: warm, after idleness, and look-ups per second at saturation."""
    from quire_bench import lookup as bench

    bench.run(context, chunk_tokens, rounds, clients).show(json_file, plot)


def bench_index(
    chunks: Annotated[int, typer.Option(min=1000, help="of each shape")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="seed of what is drawn at random")] = 1,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Bytes of Redis that a chunk takes in the prefix index, and the server's time to register and to match it."""
    from quire_bench import index as bench
    from quire_bench import pairs

    report = bench.run(chunks, seed)
    report.show(json_file, plot, draw=partial(pairs.draw, report, "bytes", lambda params: params["shape"]))


def bench_delivery(
    tier: Annotated[str, typer.Option(help="where the chunks lie: memory, drives, or object")] = "memory",
    transport: Annotated[str, typer.Option(help="ucx, or shm: memory that is shared on one host")] = "ucx",
    chunk_tokens: Annotated[str, typer.Option(help="one or several: 16,64,256")] = "16,64,256",
    context: Annotated[str, typer.Option(help="tokens; one or several: 2048,8192,65536")] = "65536",
    hit: Annotated[float, typer.Option(help="share of the prompt that is cached, 0 to 1")] = 0.875,
    layers: Annotated[int, typer.Option(help="layers of the model")] = 32,
    rounds: Annotated[int, typer.Option(help="rounds of each measurement")] = 7,
    object_url: Annotated[str, typer.Option(help="object tier, as s3://bucket/prefix; a folder if not given")] = "",
    latency_ms: Annotated[str, typer.Option(help="added to each request of an S3 tier; one or several: 0,10")] = "0",
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Layerwise delivery (Llama 3.1 8B layout) against a bare stream.

    The stream sends the same layers by pyucx in the same run; from drives the baseline is the bare device, from the
    object tier bare range reads of the same bytes.
    """
    from quire_bench import delivery, object_tier

    sizes, contexts = ([int(text) for text in several.split(",")] for several in (chunk_tokens, context))
    if tier == "object":
        delays = [int(text) for text in latency_ms.split(",")]
        object_tier.run(object_url, sizes, contexts, hit, layers, rounds, delays).show(json_file, plot)
        return
    delivery.run(tier, transport, sizes, contexts, hit, layers, rounds).show(json_file, plot)


def bench_packs(
    object_url: Annotated[str, typer.Argument(help="object tier, as s3://bucket/prefix")],
    chunk_tokens: Annotated[str, typer.Option(help="one or several: 16,64,256")] = "16,64",
    context: Annotated[int, typer.Option(help="tokens")] = 65_536,
    layers: Annotated[int, typer.Option(help="layers of the model")] = 4,
    rounds: Annotated[int, typer.Option(help="rounds of each measurement")] = 3,
    latency_ms: Annotated[str, typer.Option(help="added to each request; one or several: 0,10,30")] = "0,10,30",
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Compare chunks as an object each with packs of chunks: bare reads, and their price."""
    from quire_bench import packs

    sizes, delays = ([int(text) for text in several.split(",")] for several in (chunk_tokens, latency_ms))
    packs.run(object_url, sizes, context, layers, rounds, delays).show(json_file, plot)


def bench_hedging(
    object_url: Annotated[str, typer.Argument(help="object tier, as s3://bucket/prefix")],
    chunk_tokens: Annotated[int, typer.Option(help="tokens of a chunk")] = 64,
    chunks: Annotated[int, typer.Option(help="chunks of the prefix")] = 16,
    layers: Annotated[int, typer.Option(help="layers of the model")] = 8,
    loads: Annotated[int, typer.Option(help="cold loads")] = 500,
    slow_percent: Annotated[float, typer.Option(help="requests that are delayed")] = 1.0,
    slow_ms: Annotated[int, typer.Option(help="for how long")] = 1000,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Cold loads from an object tier that delays some of its answers: p99 against p50."""
    from quire_bench import hedging

    hedging.run(object_url, chunk_tokens, chunks, layers, loads, slow_percent, slow_ms).show(json_file, plot)


def bench_store(
    level: Annotated[str, typer.Option(help="one or both: memory,local")] = "memory,local",
    transport: Annotated[str, typer.Option(help="ucx, or shm: memory that is shared on one host")] = "ucx",
    chunk_kib: Annotated[str, typer.Option(help="one or several")] = "64,1024,16384",
    mib: Annotated[int, typer.Option(help="of each store")] = 256,
    layers: Annotated[int, typer.Option(help="layers of the model")] = 16,
    rounds: Annotated[int, typer.Option(help="rounds of each measurement")] = 7,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Stores in one call against a bare pyucx stream of the same bytes, and against the drive's own writing of them."""
    from quire_bench import pairs
    from quire_bench import store as bench

    sizes = [int(text) for text in chunk_kib.split(",")]
    report = bench.run(level.split(","), transport, sizes, mib, layers, rounds)
    report.show(json_file, plot, draw=partial(pairs.draw, report, "GB/s", bench.label))


def bench_full(
    tier: Annotated[str, typer.Option(help="one or both: drives,memory")] = "drives,memory",
    chunk_kib: Annotated[str, typer.Option(help="one or several")] = "32,256",
    nodes: Annotated[str, typer.Option(help="numbers of storage nodes")] = "1,3",
    mib: Annotated[int, typer.Option(help="of each store")] = 16,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Stores at nodes that are full against the same stores while there was room."""
    from quire_bench import full as bench
    from quire_bench import pairs

    sizes, counts = [int(text) for text in chunk_kib.split(",")], [int(text) for text in nodes.split(",")]
    report = bench.run(tier.split(","), sizes, counts, mib)
    report.show(json_file, plot, draw=partial(pairs.draw, report, "GB/s", bench.label))


def bench_ttft(
    contexts: Annotated[
        str, typer.Option(help="prompt lengths in tokens, separated by commas")
    ] = "4096,16384,32768,65536",
    hits: Annotated[str, typer.Option(help="cached shares, 0 to 1, separated by commas")] = "0.125,0.5,0.875",
    chunk_tokens: Annotated[str, typer.Option(help="tokens of a chunk")] = "16,64,256",
    gbps: Annotated[str, typer.Option(help="the paper's link; ours is an eighth of it")] = "100,10",
    rounds: Annotated[int, typer.Option(help="rounds of each measurement")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="16K, G = 64 only, without the cold pool")] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="added TTFT over the link's rate (Figure 15)")] = False,
    bubble: Annotated[bool, typer.Option("--bubble", help="compute and stall by hit rate at 32K, by tier")] = False,
    model: Annotated[bool, typer.Option("--model", help="a small transformer's real compute, no timers")] = False,
    tier: Annotated[str, typer.Option(help="where the chunks are: memory (and drives), or object")] = "memory",
    object_url: Annotated[str, typer.Option(help="object tier, as s3://bucket/prefix; a folder if not given")] = "",
    latency_ms: Annotated[str, typer.Option(help="added to each request of an S3 tier; one or several: 0,10")] = "0",
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Time to first token by path, context, hit rate and chunk size, against pre-aggregated layers in local memory."""
    from quire_bench.ttft import figures as figures

    if sweep or bubble or model:
        from quire_bench.ttft import more as ttft_more

        report = ttft_more.sweep() if sweep else ttft_more.bubble() if bubble else ttft_more.real_model(rounds)
        figure = figures.over_rate if sweep else figures.over_hits if bubble else None
        report.show(json_file, plot, draw=partial(figure, report) if figure else None)
        return
    from quire_bench.ttft import run as ttft

    sizes = [64] if quick else numbers(chunk_tokens, int)
    lengths = [16_384] if quick else numbers(contexts, int)
    tries = min(rounds, 2) if quick else rounds
    if tier not in ("memory", "object"):
        raise InvalidRequest(f"{tier!r}; there are memory and object", field="tier")
    if tier == "object":
        from quire_bench.ttft import cold

        report = cold.run(object_url, lengths, numbers(hits, float), sizes, numbers(latency_ms, int), tries)
        report.show(json_file, plot, draw=lambda path: figures.cold_prefixes(report, path))
        return
    report = ttft.run(lengths, numbers(hits, float), sizes, numbers(gbps, float), tries, cold=not quick)
    report.show(json_file, plot, draw=lambda path: figures.overheads(report, path))


def bench_tracing(
    rounds: Annotated[int, typer.Option(help="rounds of each measurement")] = 15,
    deliveries: Annotated[int, typer.Option(help="deliveries of a round")] = 8,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """What tracing costs: deliveries with it off, for one request in a hundred, and for all, in turns."""
    from quire_bench import tracing

    tracing.run(rounds, deliveries).show(json_file, plot)
