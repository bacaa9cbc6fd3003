"""Messages of the images' interface to domain values, and back."""

from __future__ import annotations

from typing import Final

from quire.model.fitting import Fit, Gravity
from quire.model.images import ExpectedImage, ImageEntry, LeasedRecord, Rendering
from quire.wire.convert import addresses_from, addresses_to, inverse
from quire.wire.v1 import images_pb2

_FITS: Final = {images_pb2.FIT_CONTAIN: Fit.CONTAIN, images_pb2.FIT_COVER: Fit.COVER}
_GRAVITIES: Final = {
    images_pb2.GRAVITY_CENTER: Gravity.CENTER,
    images_pb2.GRAVITY_NORTH: Gravity.NORTH,
    images_pb2.GRAVITY_SOUTH: Gravity.SOUTH,
    images_pb2.GRAVITY_WEST: Gravity.WEST,
    images_pb2.GRAVITY_EAST: Gravity.EAST,
}


def image_from(message: images_pb2.ImageEntry) -> ImageEntry:
    """Read the entry of an image. Raises `InvalidRequest`."""
    return ImageEntry(
        message.image_id,
        message.record_sha256,
        record_bytes=message.record_bytes,
        latent_sha256=message.latent_sha256,
        weights_sha256=message.weights_sha256,
        height=message.height,
        width=message.width,
        created_ms=message.created_ms,
        expires_ms=message.expires_ms,
        metadata=tuple(sorted(message.metadata.items())),
        provenance=message.provenance,
        record_name=message.record_name,
    )


def image_to(entry: ImageEntry) -> images_pb2.ImageEntry:
    return images_pb2.ImageEntry(
        image_id=entry.image_id,
        record_sha256=entry.record_sha256,
        record_bytes=entry.record_bytes,
        latent_sha256=entry.latent_sha256,
        weights_sha256=entry.weights_sha256,
        height=entry.height,
        width=entry.width,
        created_ms=entry.created_ms,
        expires_ms=entry.expires_ms,
        metadata=dict(entry.metadata),
        provenance=entry.provenance,
        record_name=entry.record_name,
    )


def leased_record_from(message: images_pb2.LeasedRecord) -> LeasedRecord:
    return LeasedRecord(message.lease, addresses_from(message.nodes))


def leased_record_to(record: LeasedRecord) -> images_pb2.LeasedRecord:
    return images_pb2.LeasedRecord(lease=record.lease, nodes=addresses_to(record.nodes, grpc=False))


def expected_from(message: images_pb2.ExpectedImage) -> ExpectedImage:
    return ExpectedImage(message.absent, message.record_sha256)


def expected_to(expected: ExpectedImage) -> images_pb2.ExpectedImage:
    return images_pb2.ExpectedImage(absent=expected.absent, record_sha256=expected.record_sha256)


def rendering_from(message: images_pb2.Rendering) -> Rendering:
    """Read how an image is to be rendered. Raises `InvalidRequest`."""
    return Rendering(
        message.format or "png",
        message.quality,
        width=message.width,
        height=message.height,
        fit=_FITS.get(message.fit, Fit.CONTAIN),
        gravity=_GRAVITIES.get(message.gravity, Gravity.CENTER),
        enlarge=message.enlarge,
    )


def rendering_to(rendering: Rendering) -> images_pb2.Rendering:
    return images_pb2.Rendering(
        format=rendering.format,
        quality=rendering.quality,
        width=rendering.width,
        height=rendering.height,
        fit=inverse(_FITS, rendering.fit),
        gravity=inverse(_GRAVITIES, rendering.gravity),
        enlarge=rendering.enlarge,
    )
