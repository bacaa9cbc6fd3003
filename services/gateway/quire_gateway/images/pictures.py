"""Pictures that are put as pixels: a decoder with the VAE makes the latent record that is stored."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Final

from quire.model.errors import InvalidRequest, NoDecoder
from quire.model.images import RECORD_BYTES_MAX, ImageAttributes
from quire_gateway.images.owners import ImageOwners
from quire_gateway.images.service import PeerMemory
from quire_gateway.images.vaes import KnownVaes
from quire_gateway.ports import Decoders
from quire_server.limits.turns import FairTurns

_RGB_MAX: Final = 0xFFFFFF


@dataclass(frozen=True, slots=True)
class Encoded:
    """A latent record, and how far its image is from the picture: PSNR in dB, the largest difference of a channel.

    `first_of_several`: the picture has more frames than the one in the record.
    """

    record: bytes
    psnr_db: float
    error_max: int
    first_of_several: bool

    def described(self, attributes: ImageAttributes) -> ImageAttributes:
        """Return an image's attributes with the loss, which is kept with it."""
        loss = "fidelity-psnr-db", f"{self.psnr_db:.2f}" if math.isfinite(self.psnr_db) else "inf"
        return replace(attributes, metadata=(*attributes.metadata, loss))


class PictureUploads:
    """Every method is one request. `at_once`: pictures of clients with memory of their own that are held at a time."""

    def __init__(
        self, owners: ImageOwners, decoders: Decoders, vaes: KnownVaes, memory: PeerMemory, *, at_once: int
    ) -> None:
        self.turns = FairTurns(at_once)
        self._owners = owners
        self._decoders = decoders
        self._vaes = vaes
        self._memory = memory

    async def check(self, weights_sha256: str, background_rgb: int, attributes: ImageAttributes) -> None:
        """Check the parameters of a picture before it is read. Raises `InvalidRequest`, `NoDecoder`."""
        if background_rgb > _RGB_MAX:
            raise InvalidRequest(f"{background_rgb:#x} is no colour, 0xRRGGBB", field="background_rgb")
        await self._vaes.check_known(weights_sha256.lower() or self._only_vae())
        if attributes.provenance:
            await self._vaes.check_signed()

    async def encode(self, file: bytes, weights_sha256: str, background_rgb: int) -> Encoded:
        """Encode a picture, without weights by the cluster's only VAE.

        Raises `InvalidRequest`, `NoDecoder`, and the decoder's errors.
        """
        weights = weights_sha256.lower() or self._only_vae()
        await self._vaes.check_known(weights)
        decoder = self._owners.with_vae(weights, hashlib.sha256(file).digest())
        if decoder is None:
            raise NoDecoder("no decoder with that VAE is alive", field="weights_sha256", retry_after_s=1.0)
        with self._memory.lend(file) as source, self._memory.room(RECORD_BYTES_MAX) as (target, view):
            address = decoder.grpc_address
            encoded = await self._decoders.encode(address, source, len(file), weights, target, background_rgb)
            record = bytes(view[: encoded.record_bytes])
            return Encoded(record, encoded.psnr_db, encoded.error_max, encoded.first_of_several)

    def _only_vae(self) -> str:
        vaes = sorted(self._vaes.by_weights)
        if len(vaes) != 1:
            where = "`quire images vaes`, images.vaes() and GET /v1/vaes list them"
            raise InvalidRequest(f"which of {len(vaes)} VAEs? {where}", field="weights_sha256")
        return vaes[0]
