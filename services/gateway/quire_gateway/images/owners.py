"""The decoder that an image belongs to, and the facts that decoded images depend on, from the cluster's view."""

from __future__ import annotations

from typing import Final

from quire.model.nodes import DecoderInfo, Node
from quire_server.clock import Clock
from quire_server.core.placement import rendezvous
from quire_server.membership.cluster_view import ClusterView

_FAILED_S: Final = 3.0


class ImageOwners:
    """Owners among the live decoders. A decoder that did not answer is passed over for three seconds."""

    def __init__(self, view: ClusterView, clock: Clock) -> None:
        self._view = view
        self._clock = clock
        self._failed: dict[str, float] = {}

    @property
    def failing(self) -> tuple[str, ...]:
        """Names of decoders that are passed over."""
        now_s = self._clock.monotonic_s()
        return tuple(name for name, until_s in self._failed.items() if until_s > now_s)

    def owner(self, record_name: bytes) -> Node | None:
        """The decoder with the highest rendezvous hash for that record."""
        failing = self.failing
        usable = [node for node, _ in self._decoders() if node.node_id not in failing]
        return rendezvous(record_name, usable)[0] if usable else None

    def build(self, record_name: bytes) -> str:
        """Return the build of the decoder that a record belongs to, even if passed over; "" without a live one."""
        builds = {node.node_id: about.build for node, about in self._decoders()}
        owners = rendezvous(record_name, [node for node, _ in self._decoders()])
        return builds[owners[0].node_id] if owners else ""

    def with_vae(self, weights_sha256: str, name: bytes) -> Node | None:
        """Return, among the decoders that have a VAE, the one with the highest rendezvous hash for a name."""
        failing = self.failing
        usable = [
            node
            for node, about in self._decoders()
            if node.node_id not in failing and any(vae.weights_sha256 == weights_sha256 for vae in about.vaes)
        ]
        return rendezvous(name, usable)[0] if usable else None

    def failed(self, owner: Node) -> None:
        """Note that a decoder did not answer."""
        failing, now_s = self.failing, self._clock.monotonic_s()
        self._failed = {name: until_s for name, until_s in self._failed.items() if name in failing}
        self._failed[owner.node_id] = now_s + _FAILED_S

    def _decoders(self) -> list[tuple[Node, DecoderInfo]]:
        live = self._view.live.values()
        return [(node, node.about) for node in live if isinstance(node.about, DecoderInfo)]
