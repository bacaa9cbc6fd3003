"""Pictures that clients put out of their own memory, by gRPC."""

from __future__ import annotations

from quire.model.descriptor import RdmaTarget
from quire.model.images import ImageAttributes, ImageEntry, check_image_id
from quire.wire import convert
from quire.wire.v1 import images_pb2
from quire_gateway.images.pictures import Encoded, PictureUploads
from quire_gateway.images.service import ImageService


class PictureRequests:
    """Every method is one request. `bytes_max`: of a picture."""

    def __init__(self, images: ImageService, pictures: PictureUploads, bytes_max: int) -> None:
        self._images = images
        self._pictures = pictures
        self._bytes_max = bytes_max

    async def put(
        self, tenant: str, request: images_pb2.PutPictureRequest, source: RdmaTarget
    ) -> tuple[ImageEntry, Encoded]:
        """Read a picture and store its latent. Wrong parameters are refused before it is read.

        Raises `InvalidRequest`, `NoDecoder`, and the decoder's errors.
        """
        check_image_id(request.image_id)
        attributes = ImageAttributes(request.ttl_ms, tuple(request.metadata.items()), request.provenance)
        durability = convert.durability_from(request.durability)
        await self._pictures.check(request.weights_sha256, request.background_rgb, attributes)
        async with self._pictures.turns.turn(tenant):
            picture = await self._images.pull(source, request.picture_bytes, self._bytes_max, "picture_bytes")
            encoded = await self._pictures.encode(picture, request.weights_sha256, request.background_rgb)
            entry = await self._images.put_record(
                tenant,
                request.image_id,
                encoded.record,
                durability=durability,
                attributes=encoded.described(attributes),
            )
        return entry, encoded
