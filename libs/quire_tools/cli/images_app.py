"""`quire images`: the commands; their work is in `images`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from quire.model.fitting import Fit
from quire_tools.cli.options import FOLDER, AsJson, Folder, Gateway

images_app = typer.Typer(no_args_is_help=True, help="Images that live as latents.")


@images_app.command("put")
def images_put(
    file: Annotated[Path, typer.Argument(help="a picture, .safetensors with one tensor, or a latent record")],
    name: Annotated[str, typer.Option("--id", help="empty: the file's name")] = "",
    weights: Annotated[str, typer.Option(help="SHA-256 of the VAE's weights; empty for a picture: the only VAE")] = "",
    scale: Annotated[int | None, typer.Option(help="pixels per latent pixel; the VAE's own by default")] = None,
    scaling_factor: Annotated[
        float | None, typer.Option(help="the factor on latents; that of the VAE's configuration by default")
    ] = None,
    shift_factor: Annotated[
        float | None, typer.Option(help="subtracted from latents first; that of the VAE's configuration by default")
    ] = None,
    allow_unknown_vae: Annotated[bool, typer.Option(help="store it also where no decoder has its VAE")] = False,
    provenance: Annotated[
        str, typer.Option(help="JSON of C2PA assertions that every image of it is signed with, or `generated`")
    ] = "",
    folder: Folder = FOLDER,
    gateway: Gateway = "",
    as_json: AsJson = False,
) -> None:
    """Store a picture or a latent under an id. A picture becomes the latent that the VAE makes of it."""
    from quire_tools.cli import cluster as cluster_commands
    from quire_tools.cli import images

    address = cluster_commands.gateway_of(folder, gateway)
    image = images.ImageFile(file, weights.lower(), scale, scaling_factor, shift_factor)
    images.put(address, image, name, allow_unknown_vae, provenance, as_json=as_json)


@images_app.command("sign")
def images_sign(
    url: Annotated[str, typer.Argument(help="such as /v1/images/cat?preset=thumb, with or without a host")],
    key: Annotated[str, typer.Option(help="the access key's name")],
    secret: Annotated[str, typer.Option(envvar="QUIRE_KEY_SECRET", help="its secret key")],
    expires: Annotated[int, typer.Option(min=1, help="seconds from now")] = 3600,
) -> None:
    """Sign a URL of an image: it is read without a key until it expires."""
    from quire.model.signed_urls import signed_url

    typer.echo(signed_url(url, key=key, secret=secret, expires_s=time.time() + expires))


@images_app.command("vaes")
def images_vaes(
    folder: Folder = FOLDER,
    gateway: Gateway = "",
    as_json: AsJson = False,
) -> None:
    """VAEs that the decoders have, by the digest of their weights."""
    from quire_tools.cli import cluster as cluster_commands
    from quire_tools.cli import images

    images.vaes(cluster_commands.gateway_of(folder, gateway), as_json=as_json)


@images_app.command("get")
def images_get(
    name: Annotated[str, typer.Argument(help="the image's id")],
    out: Annotated[Path, typer.Argument(help="file to write; its suffix names the format: png, webp, jpeg, avif")],
    quality: Annotated[int, typer.Option(help="1 to 100; 0: lossless where the format can be")] = 0,
    width: Annotated[int, typer.Option(help="pixels at most; 0: as it is")] = 0,
    height: Annotated[int, typer.Option(help="pixels at most; 0: as it is")] = 0,
    fit: Annotated[Fit, typer.Option(help="the whole image within the box, or the box full of it")] = Fit.CONTAIN,
    folder: Folder = FOLDER,
    gateway: Gateway = "",
) -> None:
    """Have an image decoded and encoded."""
    from quire_tools.cli import cluster as cluster_commands
    from quire_tools.cli import images

    images.get(
        cluster_commands.gateway_of(folder, gateway),
        name,
        out=out,
        quality=quality,
        width=width,
        height=height,
        fit=fit,
    )


@images_app.command("ls")
def images_ls(
    prefix: Annotated[str, typer.Option(help="only ids that begin with it")] = "",
    folder: Folder = FOLDER,
    gateway: Gateway = "",
    as_json: AsJson = False,
) -> None:
    """Images whose ids begin with a prefix."""
    from quire_tools.cli import cluster as cluster_commands
    from quire_tools.cli import images

    images.ls(cluster_commands.gateway_of(folder, gateway), prefix, as_json=as_json)


@images_app.command("rm")
def images_rm(
    name: Annotated[str, typer.Argument(help="the image's id")], folder: Folder = FOLDER, gateway: Gateway = ""
) -> None:
    """Forget an image."""
    from quire_tools.cli import cluster as cluster_commands
    from quire_tools.cli import images

    images.rm(cluster_commands.gateway_of(folder, gateway), name)
