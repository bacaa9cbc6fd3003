"""Every error of Quire. The gRPC status of each stands in `quire.wire.status`, nowhere else.

QuireError
├── InvalidRequest              the caller sent something that can never work; `field` names it
│   ├── LayoutInvalid           a chunk layout that is zero, huge or inconsistent
│   ├── KeysInvalid             chunk keys of a wrong length or too many of them
│   ├── DescriptorInvalid       a descriptor that contradicts itself or the lease
│   ├── TargetInvalid           client memory that is too small, out of range, or has an unusable key
│   ├── MediaUnsupported        a file of a kind that is not read
│   └── PictureTooLarge         a picture with more pixels than can be encoded
├── Unauthenticated             the caller has shown no token, or one that this cluster did not give
│   └── SecretDiffers           a member signs with another secret than the cluster's
├── NotAllowed                  the caller may not do this
├── LeaseForged                 a lease that this cluster did not sign, or that covers other chunks
├── LeaseExpired                a lease whose time is over
├── ChunkMissing                a chunk that is not here (any more)
├── ImageMissing                no image of that id
├── ContentConflict             other bytes are stored under the same key
├── ConditionFailed             what is there is not as the request's conditions say
├── NameTaken                   a live node of the cluster has that name
├── CorruptData                 stored bytes do not match their checksum
├── ResourceExhausted           a limit is reached; try again later or store less
│   ├── PoolFull                no free slot on the storage node
│   ├── QuotaExceeded           a tenant has stored what it may
│   └── TooManyRequests         a bounded queue is full
├── Unavailable                 a service is not there; the request may be retried
│   ├── NoStorageNode           no live storage node can take the chunks
│   ├── NoDecoder               no live decoder can make the image
│   ├── NodeUnavailable         a node of the cluster does not answer
│   ├── MetadataUnavailable     Redis does not answer
│   ├── PartlyStored            not all chunks of a store were acknowledged
│   ├── TransferRunning         a transfer of that id was begun before, and may still touch the memory
│   └── PeerLost                the data plane to a client or node broke
├── DeadlineExceeded            not done in the time that the caller gave
├── Abandoned                   ended because the caller wants it no more
├── NotImplementedHere          this deployment does not offer it
│   └── VaeUnknown              no decoder has the VAE that a latent belongs to
├── VersionUnsupported          the other side speaks a protocol that this one does not understand
├── ConfigInvalid               environment variables that cannot be used; lists all of them
└── InternalError               a bug; the caller sees no details
"""

from __future__ import annotations


class QuireError(Exception):
    """Base of every error of Quire.

    `field` names the offending input where there is one; `retry_after_s`, where it is not 0, is when trying again makes
    sense.
    """

    def __init__(self, message: str, *, field: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.answered = False
        """Whether the other side said so itself, and not the connection to it."""
        self.unsent = False
        """Whether nothing of the request has left this process: nothing will come of it."""

    @classmethod
    def code(cls) -> str:
        """Stable name of the error, as it travels between services: the nearest one that all of them know."""
        return next(kind.__name__ for kind in cls.__mro__ if kind.__module__ == __name__)


class InvalidRequest(QuireError):
    """The caller sent something that can never work."""


class LayoutInvalid(InvalidRequest):
    """A chunk layout that is zero, huge or inconsistent."""


class KeysInvalid(InvalidRequest):
    """Chunk keys of a wrong length, or too many of them."""


class DescriptorInvalid(InvalidRequest):
    """A descriptor that contradicts itself or the lease."""


class TargetInvalid(InvalidRequest):
    """Client memory that is too small, out of range, or has an unusable key."""


class MediaUnsupported(InvalidRequest):
    """A file of a kind that is not read; the message names those that are."""


class PictureTooLarge(InvalidRequest):
    """A picture with more pixels than can be encoded; the message names the limit."""


class Unauthenticated(QuireError):
    """The caller has shown no token, or one that this cluster did not give."""


class SecretDiffers(Unauthenticated):
    """A member signs with another secret than the cluster's."""


class NotAllowed(QuireError):
    """The caller may not do this."""


class AddressUnproven(NotAllowed):
    """A worker's address that the caller has not proved to be its own."""


class LeaseForged(QuireError):
    """A lease that this cluster did not sign, or that covers other chunks."""


class LeaseExpired(QuireError):
    """A lease whose time is over."""


class ChunkMissing(QuireError):
    """A chunk that is not stored here, or no longer."""


class ImageMissing(QuireError):
    """No image of that id."""


class ConditionFailed(QuireError):
    """A condition of the request is not met. Nothing has changed."""


class ContentConflict(QuireError):
    """Other bytes are stored under the same key."""


class NameTaken(QuireError):
    """A live node of the cluster has that name."""


class CorruptData(QuireError):
    """Stored bytes do not match their checksum."""


class ResourceExhausted(QuireError):
    """A limit is reached."""


class PoolFull(ResourceExhausted):
    """No free slot on the storage node."""


class QuotaExceeded(ResourceExhausted):
    """A tenant has reached its quota; something has to be deleted first."""


class TooManyRequests(ResourceExhausted):
    """A bounded queue is full."""


class Unavailable(QuireError):
    """A service that is needed is not there; the request may be retried."""


class NoStorageNode(Unavailable):
    """No live storage node can take the chunks."""


class NoDecoder(Unavailable):
    """No live decoder can make the image."""


class NodeUnavailable(Unavailable):
    """A node of the cluster does not answer."""


class MetadataUnavailable(Unavailable):
    """Redis does not answer."""


class PeerLost(Unavailable):
    """The data plane to a client or node broke."""


class PartlyStored(Unavailable):
    """Not all chunks of a store were acknowledged: some were evicted at once, or their parents were. The others stay.

    `stored_chunks`: how many were.
    """

    stored_chunks = 0


class TransferRunning(Unavailable):
    """A transfer with that id exists already. It may still run, so the caller must not reuse the memory."""


class DeadlineExceeded(QuireError):
    """Not done in the time that the caller gave."""


class Abandoned(QuireError):
    """Ended because the caller wants it no more; nothing of it goes on."""


class NotImplementedHere(QuireError):
    """This deployment does not offer it."""


class VaeUnknown(NotImplementedHere):
    """No decoder has the VAE that a latent belongs to."""


class VersionUnsupported(QuireError):
    """The other side speaks a protocol that this one does not understand."""


class ConfigInvalid(QuireError):
    """Environment variables that cannot be used."""


class InternalError(QuireError):
    """A bug; the caller sees no details."""


def by_code(code: str) -> type[QuireError]:
    """The class with that `code()`; `InternalError` for one that this version does not know."""
    pending: list[type[QuireError]] = [QuireError]
    while pending:
        kind = pending.pop()
        if kind.code() == code:
            return kind
        pending.extend(kind.__subclasses__())
    return InternalError
