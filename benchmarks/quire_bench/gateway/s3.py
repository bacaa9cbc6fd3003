"""`quire bench s3`: the five paths of ObjectCache (§4.1) through the S3 frontend, and S3TCP beside another server."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import obstore
import typer
from obstore.store import S3Store
from rich.progress import track

from quire.client import AsyncClient
from quire.model.descriptor import DeliveryOrder, Descriptor
from quire.model.errors import InvalidRequest
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.layout import Attention, Dtype, KvLayout
from quire.telemetry import names
from quire.transport import OFF, data_plane
from quire_bench.gateway import figures
from quire_bench.gateway.bare_http import BareHttp
from quire_bench.gateway.s3_client import SignedHttp, many, namespace_header
from quire_bench.stream_peer import BareStream
from quire_server.redis import AccessKeys, connect
from quire_server.redis.keys.access import salt_of
from quire_tools.local import LocalCluster
from quire_tools.report import Report, Row, median

SIZES: Final = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
_ROUNDS: Final = 3
_PAGE: Final = 4096
# Of chunks: what is measured is not what a node writes behind meanwhile.
_MEMORY_ONLY: Final = {"QUIRE_STORAGE_DRIVES": "", "QUIRE_STORAGE_OBJECT_URL": "", "QUIRE_SHARED_MEMORY": OFF}
_TENANT: Final = "bench"
Run = Callable[[int, int], Awaitable[object]]


def _chunks_of(size: int, cluster: LocalCluster) -> Namespace:
    """Chunks that are as large as a block: one layer. Of the tenant whose key it is."""
    layout = KvLayout(1, size // _PAGE, 1, _PAGE, Dtype.FP8_E4M3, Attention.MLA)
    return Namespace("bench-s3", "1", layout, salt_of(_TENANT, cluster.secret.encode()))


class Bench:
    """A running cluster and its clients."""

    def __init__(
        self, cluster: LocalCluster, key: tuple[str, str], client: AsyncClient, http: SignedHttp, total: int
    ) -> None:
        self.total = total
        self.client = client
        self._cluster = cluster
        self.http = http
        self.tcp = _store(f"http://{cluster.s3_address}", key, "bench")

    async def paths(self, size: int, at_once: int) -> Row:
        """MB/s of each path, PUT and GET; the ratio is Direct's GET against the raw stream."""
        count = max(2 * at_once, self.total // size)
        body, space = os.urandom(size), _chunks_of(size, self._cluster)
        buffers = [self.client.allocate(size) for _ in range(at_once)]
        tokens = [{"x-amz-rdma-token": buffer.target().to_token()} for buffer in buffers]
        for buffer in buffers:
            assert buffer.view is not None
            buffer.view[:] = np.frombuffer(body, dtype=np.uint8)
        headers = namespace_header(space) | {"x-quire-durability": "memory"}
        keys = [os.urandom(32).hex() for _ in range(count)]

        async def tcp_put(number: int, worker: int) -> None:
            await obstore.put_async(self.tcp, f"{size}/{number}", body, use_multipart=False)

        async def tcp_get(number: int, worker: int) -> None:
            await (await obstore.get_async(self.tcp, f"{size}/{number}")).bytes_async()

        def by_rdma(method: str, path: Callable[[int], str], more: dict[str, str]) -> Run:
            return lambda number, worker: self.http.send(method, path(number), tokens[worker] | more)

        steps: dict[str, Run] = {
            "S3TCP PUT": tcp_put,
            "S3TCP GET": tcp_get,
            "Buffer PUT": by_rdma("PUT", lambda number: f"/bench/b{size}-{number}", {}),
            "Buffer GET": by_rdma("GET", lambda number: f"/bench/b{size}-{number}", {}),
            "Direct PUT": by_rdma("PUT", lambda number: f"/quire-kv/{space.tag.hex()}/{keys[number]}", headers),
            "Direct GET": by_rdma("GET", lambda number: f"/quire-kv/{space.tag.hex()}/{keys[number]}", headers),
        }
        measured: dict[str, float] = {}
        for name, step in steps.items():
            seconds, times = await many(count, at_once, step)
            measured[f"{name}, MB/s"] = size * count / seconds / 1e6
            if name == "Direct GET":
                measured["Direct GET, ms"] = median(times) * 1e3
        raw = await self._raw(size, max(8, self.total // size))
        for buffer in buffers:
            buffer.close()
        await self._drop([ChunkKeys(bytes.fromhex(name)) for name in keys], space)
        params = {"block, KiB": size >> 10, "at once": at_once}
        return Row(params, measured, raw / 1e6, measured["Direct GET, MB/s"] * 1e6 / raw)

    async def _raw(self, size: int, blocks: int) -> float:
        """Bytes per second of blocks put by a process that does nothing else."""
        target = self.client.allocate(size * blocks)
        async with BareStream(size, blocks, target) as stream:
            rounds = [(await stream.round())[0] for _ in range(_ROUNDS + 1)][1:]
        target.close()
        return size * blocks / median(rounds)

    async def aggregation(self, chunk_tokens: int, payload: int, layers: int = 32) -> Row:
        """GB/s of one descriptor against a request per object, Llama 3.1 8B's chunks (Figure 11, Table A7)."""
        layout = KvLayout(layers, chunk_tokens, 8, 128, Dtype.BF16)
        space = replace(_chunks_of(_PAGE, self._cluster), model_id=f"bench-agg-{chunk_tokens}", layout=layout)
        chunks = max(1, payload // layout.chunk_bytes)
        payload = chunks * layout.chunk_bytes
        buffer = self.client.allocate(payload)
        assert buffer.view is not None
        buffer.view[:] = np.random.default_rng(1).integers(0, 256, payload, dtype=np.uint8)
        chain, alone = ChunkKeys(os.urandom(32 * chunks)), [os.urandom(32).hex() for _ in range(chunks)]
        headers = namespace_header(space) | {"x-quire-durability": "memory"}
        sized = (layout.num_layers, layout.chunk_tokens, layout.slice_bytes)
        described = {
            order: {"x-quire-descriptor": Descriptor(chain, *sized, order, buffer.target()).to_header()}
            for order in (DeliveryOrder.CHUNKWISE, DeliveryOrder.LAYERWISE)
        }
        await self.http.send("PUT", "/quire-kv", headers | described[DeliveryOrder.LAYERWISE])
        slots = [self.client.allocate(layout.chunk_bytes) for _ in range(8)]
        tokens = [{"x-amz-rdma-token": slot.target().to_token()} for slot in slots]

        async def put(number: int, worker: int) -> None:
            await self.http.send("PUT", f"/quire-kv/{space.tag.hex()}/{alone[number]}", headers | tokens[worker])

        async def get(number: int, worker: int) -> None:
            await self.http.send("GET", f"/quire-kv/{space.tag.hex()}/{alone[number]}", headers | tokens[worker])

        await many(chunks, 8, put)
        single = [payload / (await many(chunks, 8, get))[0] / 1e9 for _ in range(_ROUNDS)]
        measured = {"per object, GB/s": median(single)}
        lines = 0
        for name, order in (("Batch", DeliveryOrder.CHUNKWISE), ("Agg", DeliveryOrder.LAYERWISE)):
            rates = []
            for _ in range(_ROUNDS):

                async def whole(number: int, worker: int, order: DeliveryOrder = order) -> None:
                    nonlocal lines
                    _, body = await self.http.send("GET", "/quire-kv", headers | described[order])
                    lines = body.count(b'"layer"')

                rates.append(payload / (await many(1, 1, whole))[0] / 1e9)
            measured[f"{name}, GB/s"] = median(rates)
        for each in (*slots, buffer):
            each.close()
        await self._drop([chain, *(ChunkKeys(bytes.fromhex(name)) for name in alone)], space)
        measured |= {"elements": chunks * layers, "told as": lines}
        params = {"G": chunk_tokens, "N": chunks, "S, KiB": layout.slice_bytes >> 10, "MiB": payload >> 20}
        base = measured["per object, GB/s"]
        return Row(params, measured, base, measured["Agg, GB/s"] / base)

    async def _drop(self, chains: list[ChunkKeys], space: Namespace) -> None:
        await many(len(chains), 32, lambda number, worker: self.client.evict(space, chains[number]))


def _store(url: str, key: tuple[str, str], bucket: str) -> S3Store:
    options: Any = {"allow_http": True, "timeout": "60s"}
    return S3Store(
        bucket,
        endpoint=url,
        access_key_id=key[0],
        secret_access_key=key[1],
        region="us-east-1",
        client_options=options,
        virtual_hosted_style_request=False,
    )


async def _key(cluster: LocalCluster) -> tuple[str, str]:
    redis = connect(cluster.redis_url)
    keys = AccessKeys(redis, cluster.secret.encode())
    key = await keys.create(_TENANT, rdma=True)
    await redis.aclose()
    return key.name, keys.secret(key)


def run_paths(sizes: list[int], at_once: list[int], total: int, show_progress: bool = True) -> tuple[Report, Report]:
    """By path, and by aggregation; in one cluster."""
    paths = Report("s3", {"name": "raw UCX stream of blocks, same run", "unit": "MB/s"}, tall=True)
    aggregated = Report("s3 aggregation", {"name": "a request per object, same run", "unit": "GB/s"}, tall=True)

    async def measure(cluster: LocalCluster) -> None:
        key = await _key(cluster)
        async with (
            AsyncClient(cluster.gateway_address, transport=data_plane(OFF)) as client,
            SignedHttp(f"http://{cluster.s3_address}", *key) as http,
        ):
            await http.send("PUT", "/bench")
            bench = Bench(cluster, key, client, http, total)
            cases = [(size, workers) for size in sizes for workers in at_once]
            for size, workers in track(cases, "paths", disable=not show_progress, transient=True):
                paths.rows.append(await bench.paths(size, workers))
            sweep = [(tokens, payload) for payload in (total // 4, total) for tokens in (16, 64, 256)]
            for tokens, payload in track(sweep, "aggregation", disable=not show_progress, transient=True):
                aggregated.rows.append(await bench.aggregation(tokens, payload))

    with (
        tempfile.TemporaryDirectory(prefix="quire-s3-") as folder,
        LocalCluster(Path(folder), arena_bytes=1 << 30, settings=_MEMORY_ONLY) as cluster,
    ):
        asyncio.run(measure(cluster))
    paths.notes.append(
        "S3TCP by obstore (signed payloads), objects in a folder; Buffer through the gateway's memory, same objects; "
        "Direct between the storage node's memory and the client's, one HTTP request an object"
    )
    aggregated.notes.append(
        "per object: S3RDMA Direct, 8 at a time; elements: slices that a client without aggregation would ask for; "
        "told as: messages that it gets instead, one a layer"
    )
    return paths, aggregated


def run_breakdown(sizes: list[int], requests: int = 40) -> Report:
    """Where the time of one S3RDMA Direct GET goes, alone, from its trace (Figure 10)."""
    report = Report("s3 latency", {"name": "raw UCX put of one block, same run", "unit": "ms"}, tall=True)

    async def measure(cluster: LocalCluster, size: int) -> tuple[str, list[float], float]:
        key, space, trace_id = await _key(cluster), _chunks_of(size, cluster), os.urandom(16).hex()
        async with (
            AsyncClient(cluster.gateway_address, transport=data_plane(OFF)) as client,
            SignedHttp(f"http://{cluster.s3_address}", *key) as http,
        ):
            buffer, path = client.allocate(size), f"/quire-kv/{space.tag.hex()}/{os.urandom(32).hex()}"
            token = {"x-amz-rdma-token": buffer.target().to_token()}
            headers = namespace_header(space) | token | {"x-quire-durability": "memory"}
            await http.send("PUT", path, headers)
            await many(5, 1, lambda number, worker: http.send("GET", path, headers))
            traced = headers | {"traceparent": f"00-{trace_id}-{os.urandom(8).hex()}-01"}
            _, times = await many(requests, 1, lambda number, worker: http.send("GET", path, traced))
            async with BareStream(size, 1, buffer) as stream:
                raw = [(await stream.round())[0] for _ in range(requests)]
        return trace_id, times, median(raw)

    with (
        tempfile.TemporaryDirectory(prefix="quire-s3-") as folder,
        LocalCluster(Path(folder), arena_bytes=256 << 20, settings=_MEMORY_ONLY, trace=True) as cluster,
    ):
        measured = {size: asyncio.run(measure(cluster, size)) for size in sizes}
        for size, (trace_id, times, raw_s) in measured.items():
            spans = _durations(Path(folder) / "traces", trace_id)
            client, gateway, deliver = median(times) * 1e3, spans[names.GATEWAY_S3], spans[names.STORAGE_DELIVER]
            columns = {
                "whole, ms": client,
                "client and HTTP": client - gateway,
                "control": gateway - deliver,
                "storage": max(0.0, deliver - raw_s * 1e3),
                "network": min(deliver, raw_s * 1e3),
            }
            report.rows.append(Row({"block, KiB": size >> 10}, columns, raw_s * 1e3, raw_s * 1e3 / client))
    report.notes.append(
        "medians; gateway and storage from their spans; network: a raw put of a block, the rest of the storage node's "
        "span is storage; control: signature, look-up, lease, two gRPC hops"
    )
    return report


def _durations(folder: Path, trace_id: str) -> dict[str, float]:
    """Median milliseconds by span name."""
    found: dict[str, list[float]] = {}
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            span = json.loads(line)
            if span["trace_id"] == trace_id:
                found.setdefault(span["name"], []).append((span["end_ns"] - span["start_ns"]) / 1e6)
    return {name: median(values) for name, values in found.items()}


def run_servers(url: str, key: tuple[str, str], size: int, count: int) -> Report:
    """S3TCP of this frontend and of another S3 server, same clients, in turns."""
    report = Report("s3 --against", {"name": f"the S3 server at {url}, same run", "unit": "MB/s"}, tall=True)

    async def measure(cluster: LocalCluster) -> None:
        places = {"ours": (f"http://{cluster.s3_address}", await _key(cluster)), "theirs": (url, key)}
        async with BareHttp(size) as bare:
            places["ceiling"] = (bare.url, key)
            for client, make in (("boto3", _boto_steps), ("obstore", _obstore_steps)):
                rates = {name: await make(place, size, count) for name, place in places.items()}
                for operation, ours in rates["ours"].items():
                    theirs, most = rates["theirs"][operation], rates["ceiling"][operation]
                    measured = {"ours, MB/s": ours, "ceiling, MB/s": most, "ceiling's ratio": most / theirs}
                    report.rows.append(Row({"client": client, "operation": operation}, measured, theirs, ours / theirs))

    with (
        tempfile.TemporaryDirectory(prefix="quire-s3-") as folder,
        LocalCluster(Path(folder), arena_bytes=64 << 20, drive_bytes=128 << 20) as cluster,
    ):
        asyncio.run(measure(cluster))
    report.notes.append(
        f"{count} objects of {size >> 10} KiB, 8 at a time; best of {_ROUNDS}; ceiling: a server that checks, hashes "
        "and keeps nothing: what the client itself leaves to any server here"
    )
    return report


async def _best(steps: dict[str, Run], size: int, count: int) -> dict[str, float]:
    """MB/s of each, eight at a time."""
    return {
        name: size * count / min([(await many(count, 8, step))[0] for _ in range(_ROUNDS)]) / 1e6
        for name, step in steps.items()
    }


async def _obstore_steps(place: tuple[str, tuple[str, str]], size: int, count: int) -> dict[str, float]:
    url, key = place
    async with SignedHttp(url, *key) as http:
        await http.send("PUT", "/quire-bench-o")
    store, body = _store(url, key, "quire-bench-o"), os.urandom(size)

    async def put(number: int, worker: int) -> None:
        await obstore.put_async(store, f"{number}", body, use_multipart=False)

    async def get(number: int, worker: int) -> None:
        await (await obstore.get_async(store, f"{number}")).bytes_async()

    return await _best({"PUT": put, "GET": get}, size, count)


async def _boto_steps(place: tuple[str, tuple[str, str]], size: int, count: int) -> dict[str, float]:
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise InvalidRequest("boto3 is not installed: pip install boto3", field="against") from None
    url, key = place
    client: Any = boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id=key[0],
        aws_secret_access_key=key[1],
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}, max_pool_connections=16),
    )
    body = os.urandom(size)
    await asyncio.to_thread(client.create_bucket, Bucket="quire-bench-b")

    async def put(number: int, worker: int) -> None:
        await asyncio.to_thread(client.put_object, Bucket="quire-bench-b", Key=f"{number}", Body=body)

    async def get(number: int, worker: int) -> None:
        await asyncio.to_thread(lambda: client.get_object(Bucket="quire-bench-b", Key=f"{number}")["Body"].read())

    return await _best({"PUT": put, "GET": get}, size, count)


def command(
    sizes: Annotated[str, typer.Option(help="block sizes, KiB")] = "64,256,1024,4096",
    total_mib: Annotated[int, typer.Option(help="bytes moved by each path")] = 128,
    at_once: Annotated[str, typer.Option(help="requests at the same time")] = "1,8",
    against: Annotated[str, typer.Option(help="URL of another S3 server: only S3TCP, compared with it")] = "",
    access_key: Annotated[str, typer.Option(help="of that server")] = "",
    secret_key: Annotated[str, typer.Option(help="of that server")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="write the last report there")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw it there (PNG)")] = None,
) -> None:
    """Objects and layers by the S3 frontend: TCP, staged, direct, batched, aggregated; or beside another server."""
    if against:
        run_servers(against, (access_key, secret_key), 1 << 20, 200).show(json_file, plot)
        return
    try:
        blocks = [int(text) << 10 for text in sizes.split(",")]
        workers = [int(text) for text in at_once.split(",")]
    except ValueError:
        raise InvalidRequest(f"{sizes!r}, {at_once!r} are no lists of numbers", field="sizes") from None
    if not 4 <= total_mib <= 512:
        raise InvalidRequest(f"{total_mib}; 4 to 512", field="total_mib")
    if not all(_PAGE <= size <= 16 << 20 and size % _PAGE == 0 for size in blocks) or not all(
        0 < n <= 256 for n in workers
    ):
        raise InvalidRequest(f"{sizes}: multiples of 4 up to 16,384; {at_once}: up to 256", field="sizes")
    paths, aggregated = run_paths(blocks, workers, total_mib << 20)
    paths.show(None, None)
    aggregated.show(None, None)
    run_breakdown(blocks).show(None, None)
    both = Report("s3", paths.baseline, [*paths.rows, *aggregated.rows], [*paths.notes, *aggregated.notes])
    figures.write(both, paths, aggregated, json_file, plot)
