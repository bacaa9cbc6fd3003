"""An engine with a tracer of its own: a KV request and an image, each under one root. Prints ids and times as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import numpy as np
from opentelemetry import trace

from quire.client import AsyncClient, ImageClient
from quire.model.descriptor import DeliveryOrder
from quire.model.latents import LatentInfo, Normalisation, Vae
from quire.model.layout import Dtype, KvLayout
from quire.telemetry import tracer
from quire_server.telemetry import configure
from tests.e2e.helpers import fresh_namespace, random_payload, some_keys, store

CHUNKS = 64


async def main(gateway: str, weights: str = "") -> None:
    configure("engine")
    namespace = fresh_namespace(KvLayout(16, 16, 8, 128, Dtype.BF16))
    keys, payload = some_keys(namespace, CHUNKS), random_payload(namespace, CHUNKS)
    ids: dict[str, object] = {}
    wall_s: dict[str, float] = {}
    async with AsyncClient(gateway) as client:
        with tracer().start_as_current_span("engine.store") as root:
            ids["store"] = _id(root)
            await store(client, namespace, keys, payload)
        for name in ("kv", "kv again"):
            with tracer().start_as_current_span("engine.request") as root:
                ids[name] = _id(root)
                found = await client.lookup(namespace, keys)
                buffer = client.allocate(namespace.layout.payload_bytes(CHUNKS))
                started = time.perf_counter()
                delivery = await client.fetch(found, buffer, order=DeliveryOrder.LAYERWISE)
                for layer in range(namespace.layout.num_layers):
                    await delivery.layer(layer)
                await delivery.summary()
                wall_s[name] = time.perf_counter() - started
                assert buffer.view is not None
                assert (buffer.view == payload.reshape(-1)).all()
                await client.release(found)
        if weights:
            await _image(client, weights, ids)
    trace.get_tracer_provider().shutdown()  # type: ignore[attr-defined]
    print(json.dumps({"ids": ids, "wall_s": wall_s}))


async def _image(client: AsyncClient, weights: str, ids: dict[str, object]) -> None:
    images = ImageClient(client)
    values = np.random.default_rng(1).standard_normal((4, 16, 16)).astype(np.float16)
    info = LatentInfo((4, 16, 16), "float16", Vae("tiny", "", weights), 64, 64, Normalisation())
    await images.put("traced", values, info)
    await images.put("cold", values + np.float16(1), info)
    with tracer().start_as_current_span("engine.image") as root:
        ids["image"] = _id(root)
        await images.get("traced")


def _id(span: trace.Span) -> str:
    return f"{span.get_span_context().trace_id:032x}"


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
