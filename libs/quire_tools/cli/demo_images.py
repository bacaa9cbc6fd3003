"""The demo's images: pictures become latents, and come back from a cache or a decode.

The VAE is the small one that ships with Quire (tools/train_demo_vae.py); its pictures are soft.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
from rich.table import Table

from quire.client import ImageClient, QuireClient
from quire.model.images import Rendering
from quire.model.latents import LatentInfo, Values
from quire_tools.local.pictures import encode, pictures

_PICTURES = 6
_REQUESTS = 160
Latent = tuple[Values, LatentInfo]


def show_images(gateway: str, folder: Path, *, shifting: bool) -> tuple[list[Any], Path]:
    """What to print, and the picture that was drawn. `shifting`: the decoders tune their split within some requests."""
    return asyncio.run(_show(gateway, folder, shifting))


async def _show(gateway: str, folder: Path, shifting: bool) -> tuple[list[Any], Path]:
    originals = pictures(_PICTURES)
    prefix = f"demo-{time.time_ns()}"
    table = Table(
        "image", "PNG, bytes", "latent, bytes", "", "miss", "latent hit", "image hit", title="ms to the image"
    )
    back, lines = [], []
    async with QuireClient(gateway) as client:
        images = ImageClient(client)
        latents = encode(originals)
        for index, (latent, info) in enumerate(latents):
            entry = await images.put(f"{prefix}-{index}", latent, info)
            times: dict[str, float] = {}
            for _ in range(6):
                started = time.perf_counter()
                image = await images.get(entry.image_id)
                times[image.source] = (time.perf_counter() - started) * 1e3
            back.append(imagecodecs.png_decode(image.data))
            png = len(image.data)
            share = f"{entry.record_bytes / png:.0%}"
            shown = [f"{times[name]:.1f}" if name in times else "–" for name in ("miss", "latent", "image")]
            table.add_row(f"{index}", f"{png}", f"{entry.record_bytes}", share, *shown)
        small = await images.get(entry.image_id, Rendering("avif", 70, 128))
        lines = [table, f"the last one as AVIF, 128 pixels wide, quality 70: {len(small.data)} bytes"]
        if shifting:
            lines.append(await _shift(client, images, prefix, latents))
    return lines, _draw(originals, back, folder / "images.png")


async def _shift(client: QuireClient, images: ImageClient, prefix: str, latents: Sequence[Latent]) -> str:
    """A workload that turns from a few favourites to all alike: what is kept as images and as latents follows."""
    names = []
    for index, (values, info) in enumerate(latents):
        for quarter, piece in enumerate(_quarters(values)):
            size = replace(info, shape=piece.shape, height=info.height // 2, width=info.width // 2)
            names.append((await images.put(f"{prefix}-{index}-{quarter}", piece, size)).image_id)
    phases = []
    rng = np.random.default_rng(1)
    for chosen in (names[: len(names) // 5], names):
        wanted = iter(rng.choice(chosen, _REQUESTS))

        async def ask(wanted: Iterator[str] = wanted) -> None:
            for name in wanted:
                await images.get(str(name))

        shares: list[float] = []
        asking = [asyncio.create_task(ask()) for _ in range(4)]
        while not all(task.done() for task in asking):
            await asyncio.sleep(0.5)
            shares.append(await _image_share(client))
        await asyncio.gather(*asking)
        await asyncio.sleep(1.2)  # stats come with heartbeats
        phases.append([*shares, await _image_share(client)])
    seen = [" ".join(share for share, _ in groupby(f"{each:.2f}" for each in phase)) for phase in phases]
    few, all_names = len(names) // 5, len(names)
    return f"the images' part of the cache: {seen[0]} with {few} favourites, {seen[1]} with all {all_names} alike"


async def _image_share(client: QuireClient) -> float:
    stats = [node.stats for node in await client.status() if node.role.value == "decoder"]
    held = sum(each.get("cache.bytes", 0.0) for each in stats)
    return sum(each.get("cache.image_bytes", 0.0) for each in stats) / held if held else 0.0


def _quarters(values: Values) -> list[Values]:
    """Four pieces of a latent, and their mirror images: pictures of their own."""
    half = values.shape[1] // 2
    pieces = [values[:, y : y + half, x : x + half] for y in (0, half) for x in (0, half)]
    return [np.ascontiguousarray(each) for piece in pieces for each in (piece, piece[:, :, ::-1])]


def _draw(originals: list[np.ndarray[Any, Any]], back: list[np.ndarray[Any, Any]], path: Path) -> Path:
    """Above as they were, below as they came back."""
    rows = [np.concatenate(row, axis=1) for row in (originals, back)]
    path.write_bytes(imagecodecs.png_encode(np.concatenate(rows, axis=0)))
    return path
