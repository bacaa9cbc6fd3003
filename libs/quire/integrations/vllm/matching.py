"""The scheduler's half: what of a request Quire has, and what of a step is to be stored.

Nothing here waits. A look-up begins when vLLM hears of a request; until it is answered the scheduler is told to ask
again. A look-up that fails, or takes too long, is a miss, and Quire is left alone for a moment then: a cache that is
away costs no request more than `lookup_timeout_s`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final

from quire.client import Lookup, SyncClient
from quire.integrations.absence import Absence
from quire.integrations.vllm.contents import ContentNames, Contents
from quire.integrations.vllm.hints import retain, retain_s
from quire.integrations.vllm.plan import LoadPlan, StepPlan, StorePlan, TryPlan, Unstored
from quire.integrations.vllm.settings import Settings
from quire.integrations.vllm.worth import Worth
from quire.model.errors import QuireError
from quire.model.hashing import Namespace, engine_keys
from quire.model.keys import KEYS_MAX, ChunkKeys
from quire.telemetry import logger

_LEASE_MS: Final = 60_000
_FRESH_S: Final = 30.0


@dataclass(slots=True)
class _Request:
    """One that vLLM has. `known`: chunks from the start that Quire has, None while that is open; `looked_up`: those it
    had when it was asked, the others this engine has stored since.

    `storable`: whether that is known; behind chunks that may be missing nothing can be stored. `load_first`: the first
    chunk of its last load. `naming`: of its contents, which have names once it ends: `contents`.
    """

    request: Any
    naming: Future[Contents] | None = None
    contents: Contents | None = None
    asking: Future[tuple[Lookup, ...]] | None = None
    asked_s: float = 0.0
    found: tuple[Lookup, ...] = ()
    known: int | None = None
    looked_up: int = 0
    storable: bool = False
    promised: tuple[int, int] = (0, 0)
    load_first: int = 0
    preemptions: int = 0
    keys: list[tuple[bytes, ...]] = field(default_factory=list)


class Matching:
    """`block_tokens`: of vLLM's blocks; `hash_tokens`: of its hashes, as many or a part. `count`: tells figures.

    `names`: of contents that vLLM's hashes do not name. `staged_blocks_max`: how many of one request a worker has room
    for in staging memory.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        client: SyncClient,
        block_tokens: int,
        hash_tokens: int,
        asynchronous: bool,
        staged_blocks_max: int,
        names: ContentNames,
        count: Callable[[str, float], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._client = client
        self._block_tokens = block_tokens
        self._hashes_per_block = block_tokens // hash_tokens
        self._asynchronous = asynchronous
        self._store_blocks_max = self._load_blocks_max = staged_blocks_max
        self._names = names
        self._count = count
        self._now_s = now_s
        self._namespaces: tuple[Namespace, ...] = ()
        self._requests: dict[str, _Request] = {}
        self._plan = StepPlan()
        self._absence = Absence(settings.away_s, now_s)
        # Blocks of layerwise loads of which no worker has told yet how they went: what any request computes behind them
        # may have to go.
        self._unsettled: dict[str, set[int]] = {}
        self._worth = Worth()
        self._step: tuple[float, int] | None = None

    # ---- what vLLM tells

    def name(self, namespaces: Sequence[Namespace], *, direct: bool) -> None:
        """What this engine's blocks are called, one for each shard; `direct`: loads need no staging memory.

        Before that everything is a miss.
        """
        self._namespaces = tuple(namespaces)
        if direct:
            self._load_blocks_max = KEYS_MAX

    def arrived(self, request: Any) -> None:
        """A new request: ask for its prefix."""
        if self._namespaces and request.request_id not in self._requests:
            state = self._requests[request.request_id] = _Request(request)
            if request.lora_request is None and not request.mm_features:
                state.contents = Contents()
                self._ask(state)
            else:
                state.asked_s = self._now_s()
                state.naming = self._client.spawn(asyncio.to_thread(self._names.of, request))

    def matched(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens behind those computed that can be loaded, or None: ask again; and whether other requests go on."""
        self.arrived(request)
        state = self._requests.get(request.request_id)
        if state is None:
            return 0, False
        computed = computed_tokens // self._block_tokens
        usable = (request.num_tokens - 1) // self._block_tokens  # the last token is always computed
        if usable <= computed:
            return 0, False
        if request.num_preemptions > state.preemptions:  # its blocks are gone: Quire may have them by now
            state.preemptions, state.known = request.num_preemptions, None
            self._give_back(state)
            self._ask(state)
        if state.known is None and not self._answered(state):
            return None, False
        if state.found and not self._names.is_current(request):
            self._give_back(state)
            state.storable = False
        if state.found and self._now_s() - state.asked_s > _FRESH_S:  # it waited so long that the lease may run out
            self._give_back(state)
            state.known = None
            self._ask(state)
            return None, False
        count = min(min(state.known or 0, usable) - computed, self._load_blocks_max) if state.found else 0
        if count <= 0:
            return 0, False
        decided = not self._settings.cut_off or state.promised == (computed, count)
        if not decided and not self._worth.load(count, count * self._block_tokens):
            self._count("recomputed_blocks", min(state.known or 0, usable) - computed)
            self._try(state, computed, count)
            self._give_back(state)
            return 0, False
        state.promised = (computed, count)
        return count * self._block_tokens, self._asynchronous

    def _try(self, state: _Request, first: int, count: int) -> None:
        """See now and then what loading takes by now."""
        few = self._worth.tried(count, self._now_s())
        if few:
            self._plan.tries.append(TryPlan(found=state.found, first=first, count=few))
            state.found = ()  # the lease is the try's

    def allocated(self, request: Any, block_ids: Sequence[int], tokens: int) -> None:
        """vLLM has blocks for the request, and wants `tokens` of what was promised, or nothing."""
        state = self._requests.get(request.request_id)
        if state is None or not state.found:
            return
        first, count = state.promised
        if tokens <= 0:
            self._give_back(state)
            return
        count = min(count, tokens // self._block_tokens)
        self._plan.loads.append(
            LoadPlan(
                request_id=request.request_id,
                found=state.found,
                first=first,
                blocks=tuple(block_ids[first : first + count]),
                asynchronous=self._asynchronous,
                worth_s=self._worth.compute_s(count * self._block_tokens) if self._settings.cut_off else 0.0,
            )
        )
        state.found = ()  # the lease is the load's from here on
        state.load_first = first
        if not self._asynchronous:
            self._unsettled[request.request_id] = set(block_ids[first : first + count])

    def ended(self) -> None:
        """The step that was planned last has run."""
        if self._step is not None:
            started_s, tokens = self._step
            self._worth.computed(tokens, self._now_s() - started_s)
            self._step = None

    def loaded(self, told: Sequence[tuple[int, float]]) -> None:
        """How long loads took: blocks and seconds of each."""
        for blocks, seconds in told:
            self._worth.loaded(blocks, seconds)

    def settled(self, told: Sequence[tuple[str, bool]]) -> None:
        """How loads went, by worker. What did not arrive in one shard is stored again in all of them."""
        for request_id, arrived in told:
            self._unsettled.pop(request_id, None)
            state = self._requests.get(request_id)
            if state is not None and state.known is not None and not arrived:
                state.known = min(state.known, state.load_first)

    def unstored(self, told: Sequence[Unstored]) -> None:
        """What workers did not store: what found no room is tried again, what failed is not, nor what is behind it."""
        for each in told:
            state = self._requests.get(each.request_id)
            if state is not None and state.known is not None:
                state.known = min(state.known, each.first)
                state.storable = state.storable and each.later

    def step(self, scheduled: Sequence[tuple[str, int, int]], blocks_of: Callable[[str], Sequence[int]]) -> StepPlan:
        """The plan of a step. `scheduled`: request, tokens computed before, tokens in this step."""
        plan, self._plan = self._plan, StepPlan()
        plan.idle = not scheduled
        # A step that loads layer by layer takes as long as its loads.
        tokens = 0 if any(not load.asynchronous for load in plan.loads) else sum(each[2] for each in scheduled)
        self._step = (self._now_s(), tokens)
        if self._settings.store:
            for request_id, computed, count in scheduled:
                store = self._store(request_id, computed, count, blocks_of)
                if store is not None:
                    plan.stores.append(store)
        return plan

    def finished(self, request_id: str) -> None:
        """vLLM is done with it, well or not."""
        state = self._requests.pop(request_id, None)
        self._plan.abandoned.append(request_id)
        if state is not None:
            self._give_back(state)
            self._retain(state)

    def _retain(self, state: _Request) -> None:
        """Its prompt's whole blocks, if that was asked for."""
        request, seconds = state.request, retain_s(state.request)
        hashed = len(request.block_hashes) // self._hashes_per_block
        whole = min(request.num_prompt_tokens // self._block_tokens, hashed, self._blocks_max(state))
        if seconds and whole:
            prefixes = list(zip(self._spaces(state), self._keys(state, whole), strict=True))
            self._client.spawn(retain(self._client.asynchronous, prefixes, seconds))

    def reset(self) -> None:
        """From now on nothing that was stored before is found: the weights may have changed."""
        since = uuid.uuid4().hex[:16]
        self._namespaces = tuple(
            replace(each, weight_version=f"{each.weight_version.partition('#')[0]}#{since}")
            for each in self._namespaces
        )
        for state in self._requests.values():
            self._give_back(state)
            state.known, state.keys = 0, []
            state.storable = False

    # ---- stores

    def _store(
        self, request_id: str, computed: int, tokens: int, blocks_of: Callable[[str], Sequence[int]]
    ) -> StorePlan | None:
        state = self._requests.get(request_id)
        if state is None or (state.known is None and not self._answered(state)) or not state.storable:
            return None
        request, first = state.request, state.known or 0
        until = (computed + tokens) // self._block_tokens
        if not self._settings.store_output:
            until = min(until, request.num_prompt_tokens // self._block_tokens)
        hashed = len(request.block_hashes) // self._hashes_per_block
        until = min(until, hashed, self._blocks_max(state), first + self._store_blocks_max)
        if until <= first:
            return None
        if not self._names.is_current(request):
            state.storable = False
            return None
        blocks = tuple(blocks_of(request_id)[:until])
        if len(blocks) < until or any(not unsettled.isdisjoint(blocks) for unsettled in self._unsettled.values()):
            return None
        state.known = until
        return StorePlan(
            request_id=request_id,
            namespaces=self._spaces(state),
            keys=self._keys(state, until),
            known=state.looked_up,
            first=first,
            blocks=blocks[first:],
        )

    # ---- look-ups

    def _ask(self, state: _Request) -> None:
        state.asked_s = self._now_s()
        chunks = min(len(state.request.block_hashes) // self._hashes_per_block, self._blocks_max(state))
        if not chunks:
            state.known, state.storable = 0, True
            return
        if self._absence:
            return  # `_answered` makes it a miss
        asked = zip(self._spaces(state), self._keys(state, chunks), strict=True)
        state.asking = self._client.spawn(_look_up(self._client, list(asked)))

    def _answered(self, state: _Request) -> bool:
        """Whether it is known what Quire has of it; what failed, or takes too long, counts as nothing."""
        if state.contents is None and not self._named(state):
            return state.known is not None
        if state.asking is None:
            state.known = 0
            return True
        if not state.asking.done():
            if self._now_s() - state.asked_s < self._settings.lookup_timeout_s:
                return False
            _when_done(state.asking, self._release)
            self._failed(state, "no answer in time")
            return True
        error = state.asking.exception()
        if error is not None:
            self._failed(state, str(error))
            return True
        self._count("lookups", 1)
        self._absence.answered()
        state.found, state.asking = state.asking.result(), None
        state.known = state.looked_up = min(len(each.keys) for each in state.found)
        state.storable = True
        if not state.known:
            self._give_back(state)
        return True

    def _named(self, state: _Request) -> bool:
        """Whether the request's contents have names; those without, or for which that takes too long, are a miss."""
        if state.naming is None:
            return False
        if not state.naming.done():
            if self._now_s() - state.asked_s >= self._settings.lookup_timeout_s:
                state.known = 0
            return False
        naming, state.naming = state.naming, None
        error = naming.exception()
        if error is None:
            state.contents = naming.result()
            self._ask(state)
            return True
        state.known = 0
        logger().warning("a request is not cached", request=state.request.request_id, reason=str(error) or repr(error))
        return False

    def _failed(self, state: _Request, why: str) -> None:
        state.asking, state.known = None, 0
        self._count("failed_lookups", 1)
        away_s = self._absence.failed()
        logger().warning("Quire does not answer look-ups; vLLM goes on without it", error=why, for_s=away_s)

    def _keys(self, state: _Request, chunks: int) -> tuple[ChunkKeys, ...]:
        """Of the first `chunks` blocks, for each shard."""
        have, step = len(state.keys), self._hashes_per_block
        if chunks > have:
            assert state.contents is not None, "named by now"
            hashes = [
                bytes(block) for block in state.request.block_hashes[have * step + step - 1 : chunks * step : step]
            ]
            fresh = ChunkKeys(b"".join(state.contents.fold(hashes, have, self._block_tokens)))
            state.keys += zip(*(engine_keys(space, fresh) for space in self._spaces(state)), strict=True)
        return tuple(
            ChunkKeys(b"".join(each[shard] for each in state.keys[:chunks])) for shard in range(len(self._namespaces))
        )

    def _spaces(self, state: _Request) -> tuple[Namespace, ...]:
        """The namespace of each shard: an adapter has its own."""
        adapter = state.contents.adapter if state.contents is not None else ""
        if not adapter:
            return self._namespaces
        return tuple(replace(space, adapter=adapter) for space in self._namespaces)

    def _blocks_max(self, state: _Request) -> int:
        """How many of its blocks have names."""
        return state.contents.blocks_max(state.request, self._block_tokens) if state.contents is not None else 0

    def _give_back(self, state: _Request) -> None:
        if state.asking is not None:
            _when_done(state.asking, self._release)
            state.asking = None
        self._release(state.found)
        state.found = ()

    def _release(self, found: Sequence[Lookup]) -> None:
        for each in found:
            if each.lease:
                self._client.spawn(_let_go(self._client, each))


async def _look_up(client: SyncClient, asked: Sequence[tuple[Namespace, ChunkKeys]]) -> tuple[Lookup, ...]:
    """Of each shard."""
    found: list[Lookup] = []
    try:
        for namespace, keys in asked:
            found.append(await client.asynchronous.lookup(namespace, keys, lease_ttl_ms=_LEASE_MS))
    except QuireError:
        for each in found:
            await _let_go(client, each)
        raise
    return tuple(found)


async def _let_go(client: SyncClient, found: Lookup) -> None:
    try:
        await client.asynchronous.release(found)
    except QuireError as error:
        logger().debug("a lease stays until it runs out", error=str(error))


def _when_done(asking: Future[tuple[Lookup, ...]], then: Callable[[Sequence[Lookup]], None]) -> None:
    asking.add_done_callback(lambda done: None if done.cancelled() or done.exception() else then(done.result()))
