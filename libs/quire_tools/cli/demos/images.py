"""The demo's images: pictures become latents, and come back from a cache or a decode.

The VAE is the small one that ships with Quire (tools/train_demo_vae.py); its pictures are soft.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np

from quire.client import AsyncClient, ImageClient
from quire.model.latents import LatentInfo, Values
from quire_tools.local.pictures import encode, pictures

_PICTURES = 6
_REQUESTS = 160
_EACH_S = 0.5
_SOURCES = {"miss": "from storage", "latent": "from a kept latent", "image": "from the cache"}
Latent = tuple[Values, LatentInfo]


def show_images(gateway: str, folder: Path, *, shifting: bool) -> list[tuple[str, str]]:
    """Lines of the summary; pictures are drawn. `shifting`: forms compete for a small cache of the decoder's."""
    return asyncio.run(_show(gateway, folder, shifting))


async def _show(gateway: str, folder: Path, shifting: bool) -> list[tuple[str, str]]:
    originals = pictures(_PICTURES)
    prefix = f"demo-{time.time_ns()}"
    back, png_bytes, record_bytes = [], 0, 0
    times: dict[str, list[float]] = {}
    async with AsyncClient(gateway) as client:
        images = ImageClient(client)
        latents = encode(originals)
        for index, (latent, info) in enumerate(latents):
            entry = await images.put(f"{prefix}-{index}", latent, info)
            for _ in range(6):
                started = time.perf_counter()
                image = await images.get(entry.image_id)
                times.setdefault(image.source, []).append((time.perf_counter() - started) * 1e3)
            back.append(imagecodecs.png_decode(image.data))
            png_bytes += len(image.data)
            record_bytes += entry.record_bytes
        medians = [f"{name} {statistics.median(times[key]):.0f} ms" for key, name in _SOURCES.items() if key in times]
        share = record_bytes / png_bytes
        lines = [("pictures", f"{_PICTURES} latents take {share:.0%} of their PNGs; to the PNG: {', '.join(medians)}")]
        lines.append(("drawn", f"{_draw(originals, back, folder / 'images.png')}: as they were, as they came back"))
        if shifting:
            phases = await _shift(client, images, prefix, latents)
            picture = folder / "cache.png"
            draw_cache(picture, phases)
            lines.append(("image cache", f"{picture}: pixels and latents, as the workload changes"))
    return lines


async def _shift(
    client: AsyncClient, images: ImageClient, prefix: str, latents: Sequence[Latent]
) -> dict[str, list[float]]:
    """A workload that turns from a few favourites to all alike: the images' share of the cache, each half second."""
    names = []
    for index, (values, info) in enumerate(latents):
        for quarter, piece in enumerate(_quarters(values)):
            size = replace(info, shape=piece.shape, height=info.height // 2, width=info.width // 2)
            names.append((await images.put(f"{prefix}-{index}-{quarter}", piece, size)).image_id)
    phases: dict[str, list[float]] = {}
    rng = np.random.default_rng(1)
    fifth = len(names) // 5
    for title, chosen in ((f"{fifth} favourites", names[:fifth]), (f"all {len(names)} alike", names)):
        names_ = iter(rng.choice(chosen, _REQUESTS))

        async def ask(names_: Iterator[str] = names_) -> None:
            for name in names_:
                await images.get(str(name))

        shares = phases[title] = []
        asking = [asyncio.create_task(ask()) for _ in range(4)]
        while not all(task.done() for task in asking):
            await asyncio.sleep(_EACH_S)
            shares.append(await _image_share(client))
        await asyncio.gather(*asking)
        for _ in range(2):  # stats come with heartbeats
            await asyncio.sleep(_EACH_S)
            shares.append(await _image_share(client))
    return phases


def draw_cache(path: Path, phases: Mapping[str, Sequence[float]]) -> None:
    """The decoder's cache over time, by form; a phase of the workload after the other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shares = [share * 100 for phase in phases.values() for share in phase]
    at = [_EACH_S * number for number in range(len(shares))]
    figure, axes = pyplot.subplots(figsize=(9, 3))
    rest = [100 - share for share in shares]
    axes.stackplot(at, shares, rest, labels=["as pixels", "as latents"], colors=["#4878a8", "#e0a458"])
    begin = 0.0
    for title, phase in phases.items():
        axes.axvline(begin, color="black", linewidth=0.8)
        axes.text(begin + 0.1, 102, title, fontsize="small")
        begin += _EACH_S * len(phase)
    axes.set(xlabel="s", ylabel="% of the cache", ylim=(0, 100), xlim=(0, max(at)))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


async def _image_share(client: AsyncClient) -> float:
    stats = [node.stats for node in await client.status() if node.role.value == "decoder"]
    cached_bytes = sum(stat.get("cache.bytes", 0.0) for stat in stats)
    return sum(stat.get("cache.image_bytes", 0.0) for stat in stats) / cached_bytes if cached_bytes else 0.0


def _quarters(values: Values) -> list[Values]:
    """Four pieces of a latent, and their mirror images: pictures of their own."""
    half = values.shape[1] // 2
    pieces = [values[:, y : y + half, x : x + half] for y in (0, half) for x in (0, half)]
    return [np.ascontiguousarray(quarter) for piece in pieces for quarter in (piece, piece[:, :, ::-1])]


def _draw(originals: list[np.ndarray[Any, Any]], back: list[np.ndarray[Any, Any]], path: Path) -> Path:
    """Draw the originals above, the served images below."""
    rows = [np.concatenate(row, axis=1) for row in (originals, back)]
    path.write_bytes(imagecodecs.png_encode(np.concatenate(rows, axis=0)))
    return path
