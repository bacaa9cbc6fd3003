"""`quire images`: put, get, ls, rm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from quire.client import AsyncClient, Image, ImageClient
from quire.model.errors import InvalidRequest
from quire.model.fitting import Fit
from quire.model.images import MEDIA_TYPES, ImageAttributes, ImageEntry, Rendering
from quire.model.latents import LatentInfo, Vae, encode_record, from_safetensors
from quire.model.nodes import KnownVae
from quire.model.vaes import normalisation_of

_RECORD: Final = b"QLAT"
console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A .safetensors file with one tensor, a latent record, or a picture, and the VAE of its latent.

    `scale`, `scaling_factor` and `shift_factor`: None for those of the VAE's configuration.
    """

    path: Path
    weights_sha256: str
    scale: int | None
    scaling_factor: float | None
    shift_factor: float | None

    def read(self) -> bytes:
        """Return its bytes. Raises `InvalidRequest`."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise InvalidRequest(str(error), field="file") from None

    def record(self, raw: bytes, vaes: Sequence[KnownVae]) -> bytes:
        """Return the latent record. `raw`: its bytes; `vaes`: of the cluster's decoders. Raises `InvalidRequest`."""
        if raw[:4] == _RECORD:
            return raw
        values, dtype = from_safetensors(raw)
        vae = next((vae for vae in vaes if vae.weights_sha256 == self.weights_sha256), None)
        scale = self.scale or (vae.scale if vae is not None else 8)
        channels, height, width = values.shape
        info = LatentInfo(
            (channels, height, width),
            dtype,
            Vae(self.path.stem, weights_sha256=self.weights_sha256),
            height * scale,
            width * scale,
            normalisation_of(vae, self.scaling_factor, self.shift_factor),
        )
        return encode_record(values, info)


def put(
    gateway: str, file: ImageFile, image_id: str, allow_unknown_vae: bool, provenance: str, *, as_json: bool
) -> None:
    """Put an image. A file that is neither a latent record nor .safetensors counts as a picture.

    Raises `InvalidRequest`, also if no decoder signs provenance; `RecordInvalid` if none has its VAE.
    """
    attributes = ImageAttributes(provenance=provenance)

    async def store() -> ImageEntry:
        async with AsyncClient(gateway) as client:
            images, raw, name = ImageClient(client), file.read(), image_id or file.path.stem
            if raw[:4] != _RECORD and file.path.suffix.lower() != ".safetensors":
                put_ = await images.put_picture(name, raw, weights_sha256=file.weights_sha256, attributes=attributes)
                return put_.entry
            return await images.put_record(
                name,
                file.record(raw, await images.vaes()),
                attributes=attributes,
                allow_unknown_vae=allow_unknown_vae,
            )

    entry, size = asyncio.run(store()), file.path.stat().st_size
    if as_json:
        print(json.dumps(_about(entry), indent=2))
        return
    console.print(f"{entry.image_id}: {entry.height} × {entry.width}, {entry.record_bytes} bytes stored of {size}")


def vaes(gateway: str, *, as_json: bool) -> None:
    """List the VAEs by name, and how their digests are computed."""

    async def ask() -> list[KnownVae]:
        async with AsyncClient(gateway) as client:
            return await ImageClient(client).vaes()

    vaes_ = asyncio.run(ask())
    if as_json:
        print(json.dumps([asdict(vae) for vae in vaes_], indent=2))
        return
    table = Table("name", "class", "channels", "pixels per value", "scaling", "shift")
    table.add_column("weights, SHA-256", overflow="fold", min_width=32)
    for vae in vaes_:
        scaling, shift = f"{vae.scaling_factor:g}", f"{vae.shift_factor:g}"
        table.add_row(vae.name, vae.class_name, str(vae.channels), str(vae.scale), scaling, shift, vae.weights_sha256)
    console.print(table)
    console.print("A VAE's digest: sha256sum FOLDER/diffusion_pytorch_model.safetensors", highlight=False)


def get(gateway: str, image_id: str, out: Path, quality: int, width: int, height: int, fit: Fit) -> None:
    """The suffix of `out` names the format. Raises `InvalidRequest`, `ImageMissing`."""
    name = out.suffix.lstrip(".").lower().replace("jpg", "jpeg")
    if name not in MEDIA_TYPES:
        raise InvalidRequest(f"{out.suffix!r}; there are {', '.join(MEDIA_TYPES)}", field="out")

    async def fetch() -> Image:
        async with AsyncClient(gateway) as client:
            return await ImageClient(client).get(image_id, Rendering(name, quality, width, height, fit))

    image = asyncio.run(fetch())
    out.write_bytes(image.data)
    spent = ", ".join(f"{stage} {spent / 1e3:.1f}" for stage, spent in image.stages_us.items())
    console.print(f"{out}: {len(image.data)} bytes, from {image.decoder} ({image.source}; ms: {spent or '–'})")


def _about(entry: ImageEntry) -> dict[str, str | int]:
    about: dict[str, str | int] = {"id": entry.image_id, "width": entry.width, "height": entry.height}
    return about | {"record_bytes": entry.record_bytes, "weights_sha256": entry.weights_sha256}


def ls(gateway: str, prefix: str, *, as_json: bool) -> None:
    """List the images in order of their ids. As JSON an object a line: there may be many."""

    async def show() -> None:
        table = Table("id", "size", "bytes as a latent", "vae")
        async with AsyncClient(gateway) as client:
            async for entry in ImageClient(client).list(prefix):
                if as_json:
                    print(json.dumps(_about(entry)), flush=True)
                    continue
                size = f"{entry.width} × {entry.height}"
                table.add_row(entry.image_id, size, str(entry.record_bytes), entry.weights_sha256[:12] or "–")
        if not as_json:
            console.print(table)

    asyncio.run(show())


def rm(gateway: str, image_id: str) -> None:
    """Delete an image, and say whether there was one."""

    async def delete() -> bool:
        async with AsyncClient(gateway) as client:
            return await ImageClient(client).delete(image_id)

    console.print(f"{image_id}: {'deleted' if asyncio.run(delete()) else 'there was none'}")
