"""Configuration of the decoder, from QUIRE_DECODER_*."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quire_decoder.core.precision import CHOICES
from quire_server.config import MemberConfig, setting

PREFIX = "QUIRE_DECODER_"
ENGINES: Final = ("auto", "eager", "channels_last", "compile", "graphs", "tensorrt")
"""Ways to run a VAE; see `adapters.engines`."""


@dataclass(frozen=True, slots=True)
class DecoderConfig(MemberConfig):
    """Units are in the names."""

    listen: str = setting("127.0.0.1:7415", "host:port to listen on")
    advertise: str = setting("", "host:port under which others reach it; empty: as listened")
    node_id: str = setting("decoder-0", "name in the cluster")
    orchestrator_address: str = setting(
        "127.0.0.1:7411", "where the orchestrator listens", variable="QUIRE_ORCHESTRATOR_ADDRESS"
    )
    models: str = setting("", "folders of VAEs (diffusers), separated by commas; the demo's is always there")
    warm: bool = setting(True, "load the VAEs before serving; else each with its first image")
    device: str = setting("auto", "cpu, cuda for all GPUs, cuda:N for one, or auto for what there is")
    engine: str = setting(
        "auto",
        "eager, channels_last, graphs, compile or tensorrt; auto by the device. The last two are built once for each "
        "shape, in minutes in which the VAE is decoded eagerly",
        choices=ENGINES,
    )
    engines_folder: str = setting("", "where engines that are built are kept; empty: the user's cache")
    graph_bytes: int = setting(8 << 30, "memory of a device for recorded graphs; the least used go", minimum=0)
    dtype: str = setting(
        "record",
        "number format of decoding: as the record says; auto: the quickest whose pictures are near those of float32",
        choices=CHOICES,
    )
    batch_max: int = setting(8, "latents decoded together, where that pays and changes no pixel", minimum=1)
    model_bytes: int = setting(2 << 30, "memory for loaded VAEs; the least used go", minimum=1)
    decode_bytes: int = setting(4 << 30, "memory for decoding an image; larger ones are decoded in tiles", minimum=1)
    cache_bytes: int = setting(256 << 20, "memory for latents, images and renditions together", minimum=0)
    cache: str = setting(
        "forms",
        "forms: each form competes by what it saves; latentbox: the published cache, of images and latents",
        choices=("forms", "latentbox"),
    )
    cache_window: int = setting(10_000, "requests between two steps of the published cache's split", minimum=1)
    cache_forms: str = setting("renditions,images,latents", "what is kept; what saves most per byte stays")
    cache_history: int = setting(1 << 16, "requests that the rates of use are learnt from", minimum=16)
    pixels_max: int = setting(1 << 26, "pixels of an image; larger ones are refused", minimum=1)
    provenance_certificates: str = setting(
        "", "PEM file: certificates to sign C2PA provenance with, the signer's first"
    )
    provenance_key: str = setting("", "PEM file: the signer's private key (Ed25519, P-256, P-384 or RSA)")
    fetches_max: int = setting(16, "records fetched at a time", minimum=1)
    threads: int = setting(2, "threads that decompress, and as many that encode", minimum=1)
    encode_short_pixels: int = setting(1 << 20, "pixels up to which an image is encoded in a thread", minimum=1)
    encode_processes: int = setting(1, "larger images that are encoded at a time, each in a process", minimum=1)
    encode_bytes: int = setting(1 << 30, "memory that encoding one of those may take", minimum=1)
    encode_timeout_s: float = setting(60.0, "time that encoding one of those may take", minimum=0.1)
    fetch_delay_ms: float = setting(0.0, "added to every fetch, to measure with a far store's latency", minimum=0)
    fetch_timeout_s: float = setting(30.0, "deadline of fetching a record", minimum=0.1)
    requests_max: int = setting(256, "requests at the same time; more are refused", minimum=1)
    stop_grace_s: float = setting(2.0, "time for running requests at SIGTERM", minimum=0)

    @property
    def model_folders(self) -> list[str]:
        return [folder.strip() for folder in self.models.split(",") if folder.strip()]
