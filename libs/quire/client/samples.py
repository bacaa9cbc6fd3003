"""Look-ups of prefixes by samples of their keys: a few hundred bytes in place of all keys of a long prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from quire.client.lookup import Lookup, Prompt, lookup_of, lookup_request, shards_at_once
from quire.model.hashing import Namespace
from quire.model.keys import BUCKET_CHUNKS, ChunkKeys, KeySample
from quire.model.nodes import Location
from quire.wire.v1 import gateway_pb2 as pb

_SAMPLED_FROM: Final = BUCKET_CHUNKS + BUCKET_CHUNKS // 2
"""Keys from which a sample is sent: of fewer it has nearly all."""
_ENDS_MAX: Final = 4096
_SAMPLES_MAX: Final = 2
"""Samples that are sent before all keys are: chunks may come or go between two of them."""


class SampledLookups:
    """Look-ups of a client.

    `ask`: sends a request. `takes_samples`: whether the gateway can do with samples of keys.
    """

    def __init__(
        self,
        ask: Callable[[pb.LookupRequest], Awaitable[pb.LookupResponse]],
        location: Location,
        takes_samples: Callable[[], bool],
    ) -> None:
        self._ask = ask
        self._location = location
        self._takes_samples = takes_samples
        self._chooser = SampleChooser()

    async def find(
        self,
        shards: Sequence[tuple[Namespace, ChunkKeys]],
        lease_ttl_ms: int,
        *,
        prompt: Prompt | None = None,
        unchained: bool = False,
    ) -> list[Lookup]:
        """Look up shards, several by one request; ask again where a sample does not say where the prefix ends."""
        is_sampled = not unchained and self._takes_samples()
        samples = [self._chooser.first(keys) if is_sampled else None for _, keys in shards]
        requests, lookups = [0] * len(shards), dict[int, Lookup]()
        while pending := [at for at in range(len(shards)) if at not in lookups]:
            takes_samples = self._takes_samples()
            asking = [(shards[at][0], (takes_samples and samples[at]) or shards[at][1]) for at in pending]
            asking = asking[: shards_at_once(asking)]
            request = lookup_request(asking, self._location, lease_ttl_ms, prompt=prompt, unchained=unchained)
            response = await self._ask(request)
            answers = (response, *response.other_shards)  # a gateway of the release before answers for the first alone
            for at, answer in zip(pending, answers, strict=False):
                namespace, keys = shards[at]
                requests[at] += 1
                if answer.HasField("wanted_bucket"):
                    samples[at] = self._chooser.next(keys, answer.wanted_bucket, requests[at])
                elif takes_samples and samples[at] and not answer.matched_chunks and not self._takes_samples():
                    samples[at] = None  # it went to a gateway of the release before, which saw no key at all
                else:
                    lookups[at] = lookup_of(namespace, keys, answer)
                    if not unchained:
                        self._chooser.note(keys, answer.matched_chunks)
        return [lookups[at] for at in range(len(shards))]


class SampleChooser:
    """Chooses the index bucket whose keys a sample has: the one in which the prefix probably ends.

    Of a prefix that is looked up again that is where it ended before. Of a longer one it is where the one before was
    asked for to its end: the next look-up of a conversation finds what the turn before has stored.
    """

    def __init__(self) -> None:
        self._ends: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """By a bucket's first key: how many keys were asked for, of a prefix that ends in it, and where it ended."""

    def first(self, keys: ChunkKeys) -> KeySample | None:
        """Return the sample to begin with; None where all keys are to be sent."""
        if len(keys) < _SAMPLED_FROM:
            return None
        last = (len(keys) - 1) // BUCKET_CHUNKS
        for bucket in range(last, -1, -1):
            if end := self._ends.get(keys.at(bucket * BUCKET_CHUNKS)):
                key_count, wanted_bucket = end
                return keys.sample(wanted_bucket if key_count == len(keys) else bucket)
        return keys.sample(last)

    def next(self, keys: ChunkKeys, wanted_bucket: int, requests: int) -> KeySample | None:
        """Return the sample that an answer wants, after that many requests; None where all keys are to be sent."""
        is_bucket = wanted_bucket * BUCKET_CHUNKS < len(keys)
        return keys.sample(wanted_bucket) if is_bucket and requests < _SAMPLES_MAX else None

    def note(self, keys: ChunkKeys, matched_chunks: int) -> None:
        """Note where a prefix ended."""
        if len(keys) < _SAMPLED_FROM:
            return
        bucket = max(0, matched_chunks - 1) // BUCKET_CHUNKS
        self._ends.setdefault(keys.at(bucket * BUCKET_CHUNKS), (matched_chunks, bucket))
        opener = keys.bucket_of(len(keys) - 1)
        self._ends[opener] = len(keys), bucket
        self._ends.move_to_end(opener)
        while len(self._ends) > _ENDS_MAX:
            self._ends.popitem(last=False)
