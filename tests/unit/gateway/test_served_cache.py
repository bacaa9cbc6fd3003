"""What a gateway remembers of images: those that it has just sent, and those that are new."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from quire.model.descriptor import RdmaTarget
from quire.model.errors import NodeUnavailable
from quire.model.images import ImageEntry
from quire.model.nodes import DecoderInfo, KnownVae, Node
from quire.testing.clock import FakeClock
from quire_gateway.images.owners import ImageOwners
from quire_gateway.images.reads import ImageServed
from quire_gateway.images.served_cache import ServedImages
from quire_gateway.images.warming import Warming

ENTRY = ImageEntry("cat", bytes(32), 100, bytes(32), "", 8, 8)
VAE = KnownVae(weights_sha256="ab" * 32, channels=4, scale=8)


def _sent(etag: str, size: int) -> tuple[ImageServed, bytes]:
    return ImageServed(ENTRY, etag, size), b"x" * size


def test_the_least_recently_sent_leaves_first() -> None:
    kept = ServedImages(320)
    for number in range(16):
        kept.keep(*_sent(str(number), 20))
    assert kept.get(ENTRY, "0") == _sent("0", 20)
    kept.keep(*_sent("16", 20))
    assert kept.get(ENTRY, "1") is None and kept.get(ENTRY, "0") is not None
    kept.keep(*_sent("large", 21))
    assert kept.get(ENTRY, "large") is None, "a sixteenth at most"
    kept.keep(*_sent("empty", 0))
    assert kept.get(ENTRY, "empty") is None
    theirs = replace(ENTRY, record_name=b"another tenant's record's name.."[:32])
    assert kept.get(ENTRY, "16") is not None and kept.get(theirs, "16") is None, "though it has the same bytes"
    none = ServedImages(0)
    none.keep(*_sent("any", 1))
    assert none.get(ENTRY, "any") is None


class _Cluster:
    """Two decoders, of which the second has the VAE."""

    def __init__(self) -> None:
        self.live = {
            name: Node(node_id=name, about=DecoderInfo(build="b", vaes=vaes), grpc_address=f"{name}:1")
            for name, vaes in (("d0", ()), ("d1", (VAE,)))
        }
        self.warmed: list[tuple[str, bytes]] = []
        self.lent: list[bytes] = []
        self.gate, self.fails = asyncio.Event(), False

    @contextlib.contextmanager
    def lend(self, data: bytes) -> Iterator[RdmaTarget]:
        self.lent.append(data)
        try:
            yield RdmaTarget(b"w", 4096, len(data), b"k")
        finally:
            self.lent.remove(data)

    async def warm(self, address: str, entry: ImageEntry, source: RdmaTarget, length: int) -> None:
        await self.gate.wait()
        if self.fails:
            raise NodeUnavailable("away")
        self.warmed.append((address, self.lent[0][:length]))


async def test_new_images_are_told_to_their_decoder_afterwards() -> None:
    """Sixteen at a time. A failure is logged and nothing else; the memory stays lent until the decoder has read it."""
    cluster: Any = _Cluster()
    owners = ImageOwners(cluster, FakeClock())
    warming = Warming(owners, cluster, cluster.lend)
    for _ in range(40):
        warming.stored(ENTRY, b"record")
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(cluster.lent) == 16, "the others are fetched when they are asked for"
    cluster.gate.set()
    async with asyncio.timeout(5):
        while cluster.lent:
            await asyncio.sleep(0)
    owner = owners.owner(ENTRY.record_sha256)
    assert owner is not None and set(cluster.warmed) == {(owner.grpc_address, b"record")}
    cluster.fails = True
    warming.stored(ENTRY, b"record")
    cluster.gate.clear()
    warming.stored(ENTRY, b"record")
    await warming.close()
    assert not cluster.lent


async def test_which_decoder() -> None:
    """By claim among those that answer; for pictures among those that have the VAE."""
    cluster: Any = _Cluster()
    clock = FakeClock()
    owners = ImageOwners(cluster, clock)
    assert owners.build(bytes(32)) == "b"
    by_record = [owners.owner(bytes([number]) * 32) for number in range(40)]
    assert {each.node_id for each in by_record if each is not None} == {"d0", "d1"}
    only = owners.with_vae(VAE.weights_sha256, b"name")
    assert only is not None and only.node_id == "d1" and owners.with_vae("cd" * 32, b"name") is None
    owners.failed(only)
    assert owners.failing == ("d1",) and owners.with_vae(VAE.weights_sha256, b"name") is None
    assert all(each is not None and each.node_id == "d0" for each in (owners.owner(bytes(32)), owners.owner(b"x" * 32)))
    await clock.advance(4)
    assert not owners.failing
    cluster.live = {}
    assert owners.owner(bytes(32)) is None and owners.build(bytes(32)) == ""


@pytest.mark.parametrize("builds", [("a", "b"), ("a", "a")])
def test_the_build_is_that_of_the_owner(builds: tuple[str, str]) -> None:
    """Passing over an owner for a while changes no ETag."""
    cluster: Any = _Cluster()
    cluster.live = {
        str(number): Node(node_id=str(number), about=DecoderInfo(build=build), grpc_address="")
        for number, build in enumerate(builds)
    }
    owners = ImageOwners(cluster, FakeClock())
    for record_name in (b"1", b"2", b"3", b"4"):
        owner = owners.owner(record_name)
        assert owner is not None and owners.build(record_name) == builds[int(owner.node_id)]
        owners.failed(owner)
        assert owners.build(record_name) == builds[int(owner.node_id)]
        owners = ImageOwners(cluster, FakeClock())
