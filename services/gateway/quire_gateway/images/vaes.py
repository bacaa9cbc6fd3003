"""Abilities of the decoders: a latent that none of them decodes is not stored, nor provenance that none signs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from quire.model.errors import InvalidRequest, NoDecoder
from quire.model.latents import LatentInfo, RecordInvalid, Values
from quire.model.nodes import DecoderInfo, KnownVae
from quire.model.vaes import check_decodable
from quire_server.membership.cluster_view import ClusterView


class KnownVaes:
    """VAEs of the live decoders; without any, of the last ones."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._last: dict[str, KnownVae] = {}

    @property
    def by_weights(self) -> Mapping[str, KnownVae]:
        """VAEs by the digest of their weights."""
        abouts = [node.about for node in self._view.live.values()]
        vaes = {vae.weights_sha256: vae for about in abouts if isinstance(about, DecoderInfo) for vae in about.vaes}
        if vaes:
            self._last = vaes
        return self._last

    async def find(self, weights_sha256: str) -> KnownVae | None:
        """Return a VAE that a decoder has; None if there is none."""
        if weights_sha256 and weights_sha256 not in self.by_weights:
            await self._view.refresh()  # a decoder may have come a moment ago
        return self.by_weights.get(weights_sha256)

    async def check(self, values: Values, info: LatentInfo) -> None:
        """Check a latent. Raises `RecordInvalid` for one that no decoder decodes, `NoDecoder` if none is known."""
        try:
            await asyncio.to_thread(check_decodable, values, info, self.by_weights)
        except RecordInvalid:
            await self._view.refresh()  # a decoder may have come a moment ago
            if not (vaes := self.by_weights):
                message = "no decoder has said which VAEs it has; retry, or allow_unknown_vae for an archive"
                raise NoDecoder(message, retry_after_s=1.0) from None
            await asyncio.to_thread(check_decodable, values, info, vaes)

    async def check_known(self, weights_sha256: str) -> None:
        """Check that a decoder has a VAE.

        Raises:
            InvalidRequest: The decoders have other VAEs only.
            NoDecoder: No decoder has said which VAEs it has.
        """
        if weights_sha256 in self.by_weights:
            return
        await self._view.refresh()  # a decoder may have come a moment ago
        if not (vaes := self.by_weights):
            raise NoDecoder("no decoder has said which VAEs it has", field="weights_sha256", retry_after_s=1.0)
        if weights_sha256 not in vaes:
            names = ", ".join(sorted(f"{vae.name} ({vae.weights_sha256[:12]}…)" for vae in vaes.values()))
            message = f"no decoder has the VAE {weights_sha256[:12]}…; they have {names}: GET /v1/vaes lists them"
            raise InvalidRequest(message, field="weights_sha256")

    async def check_signed(self) -> None:
        """Check that a decoder signs provenance. Raises `InvalidRequest` if none does."""
        if not self._signs():
            await self._view.refresh()
            if not self._signs():
                message = "no decoder signs (QUIRE_DECODER_PROVENANCE_CERTIFICATES and _KEY)"
                raise InvalidRequest(message, field="provenance")

    def _signs(self) -> bool:
        abouts = [node.about for node in self._view.live.values()]
        return any(isinstance(about, DecoderInfo) and about.signer for about in abouts)
