"""Which VAEs a picture can be put with."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from quire.model.errors import InvalidRequest, NoDecoder
from quire.model.nodes import DecoderInfo, KnownVae, Node
from quire_gateway.images.vaes import KnownVaes

VAE = KnownVae(weights_sha256="ab" * 32, name="small", channels=4, scale=8)


class _View:
    """The members that a gateway sees, and those that it sees after its next refresh."""

    def __init__(self, *, now: tuple[KnownVae, ...] | None, soon: tuple[KnownVae, ...] | None) -> None:
        self._now, self._soon = now, soon

    @property
    def live(self) -> Mapping[str, Node]:
        if self._now is None:
            return {}
        return {"d": Node(node_id="d", about=DecoderInfo(build="", vaes=self._now), grpc_address="d:1")}

    async def refresh(self) -> None:
        self._now = self._soon


async def test_a_vae_that_came_a_moment_ago_is_known() -> None:
    await KnownVaes(_View(now=None, soon=(VAE,))).check_known(VAE.weights_sha256)  # type: ignore[arg-type]


async def test_a_vae_that_no_decoder_has_is_a_fault_of_the_request() -> None:
    vaes = KnownVaes(_View(now=(VAE,), soon=(VAE,)))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"cdcdcdcdcdcd…; they have small \(abababababab…\)"):
        await vaes.check_known("cd" * 32)


async def test_without_decoders_the_client_is_asked_to_retry() -> None:
    with pytest.raises(NoDecoder):
        await KnownVaes(_View(now=None, soon=None)).check_known(VAE.weights_sha256)  # type: ignore[arg-type]
