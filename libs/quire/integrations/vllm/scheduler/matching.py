"""The scheduler's half: the part of a request that Quire has, and the part of a step that is to be stored.

Nothing here waits. A look-up begins when vLLM receives a request; before its answer the scheduler has to call
again. A look-up that fails, or takes too long, is a miss, and Quire is left alone for a moment then: a cache that is
away costs no request more than `lookup_timeout_s`.
"""

from __future__ import annotations

import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import Any, Final

from quire.client import Client
from quire.integrations.vllm.contents import ContentNames
from quire.integrations.vllm.groups import NULL_BLOCK, Group, Kind, bytes_to_load
from quire.integrations.vllm.plan import LoadPlan, LoadTime, Settled, StepPlan, StorePlan, TryPlan, Unstored
from quire.integrations.vllm.scheduler.answers import answer_of
from quire.integrations.vllm.scheduler.asking import Asking
from quire.integrations.vllm.scheduler.events import StoreEvents
from quire.integrations.vllm.scheduler.following import follow_plan, part_of_handover
from quire.integrations.vllm.scheduler.handover import Counterparts, handed_over, is_for_another
from quire.integrations.vllm.scheduler.hints import carry_out, hints_of, priority_of
from quire.integrations.vllm.scheduler.load_cost import LoadCost
from quire.integrations.vllm.scheduler.lookups import RequestMatch
from quire.integrations.vllm.scheduler.requests import BlockNames, RequestPart, Spaces, State
from quire.integrations.vllm.scheduler.reuse import BlockReuse
from quire.integrations.vllm.settings import Settings
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys

_AGAIN_S: Final = (0.005, 0.1)
_AGAIN_SHARE: Final = 0.25
"""Blocks of a hand-over are asked for again after this part of the time that was waited for them, within `_AGAIN_S`."""
Blocks = Sequence[Sequence[int]]
"""Block ids of a request by group."""


class Matching:
    """Decides for one engine.

    Args:
        settings: As the user set them.
        client: Client of the cluster.
        groups: Groups of the model's layers.
        hash_tokens: Tokens in each of vLLM's hashes: as many as in a block, or a part.
        stores: Whether this engine stores what it computes; not the decode engine of a pair.
        loads: Whether it loads; not the prefill engine of a pair.
        asynchronous: Whether other requests compute while a load runs.
        staged_bytes_max: Staging memory that one request may have.
        names: Names contents that vLLM's hashes do not.
        count: Adds to a figure.
        events: Collects events of stores; None for none.
        now_s: Monotonic clock, seconds.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        client: Client,
        groups: Sequence[Group],
        hash_tokens: int,
        stores: bool = True,
        loads: bool = True,
        asynchronous: bool,
        staged_bytes_max: int,
        names: ContentNames,
        count: Callable[[str, float], None],
        events: StoreEvents | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._client = client
        self._blocks = BlockNames(groups, hash_tokens, names)
        self._asking = Asking(
            settings=settings, client=client, blocks=self._blocks, contents=names, count=count, now_s=now_s
        )
        # A prefix ends where blocks of all groups do.
        self._unit = lcm(*(group.block_tokens for group in groups))
        self._stores, self._loads = stores and settings.store != "never", loads
        self._asynchronous = asynchronous
        self._staged_bytes_max = staged_bytes_max
        self._load_bytes_max: int | None = staged_bytes_max
        self._count = count
        self._now_s = now_s
        self._requests: dict[str, State] = {}
        self._plan = StepPlan()
        # Blocks of layerwise loads that no worker has reported yet: what any request computes behind them
        # may have to be dropped.
        self._unsettled: dict[str, set[int]] = {}
        self._events = events
        self._counterparts = Counterparts(count)
        self._worth, self._reuse = LoadCost(), BlockReuse()
        self._step: tuple[float, int] | None = None

    # ---- what vLLM tells

    def name(self, spaces: Spaces, *, direct: bool, block_bytes: Sequence[int] | None = None) -> None:
        """Set the namespaces of this engine's blocks. Before this call every look-up is a miss.

        Args:
            spaces: By group and shard.
            direct: Whether loads need no staging memory.
            block_bytes: Of each group, in the worker with the most layers.
        """
        if block_bytes is not None:
            sizes = zip(self._blocks.groups, block_bytes, strict=True)
            self._blocks.groups = tuple(replace(group, block_bytes=size) for group, size in sizes)
        self._blocks.namespaces = tuple(tuple(shards) for shards in spaces)
        if direct:
            self._load_bytes_max = None

    def arrived(self, request: Any) -> None:
        """A new request: ask for its prefix."""
        if not self._blocks.namespaces or request.request_id in self._requests:
            return
        state = self._requests[request.request_id] = State(request, tuple(RequestPart() for _ in self._blocks.groups))
        state.hints = hints_of(request)
        state.handover = handed_over(request, self._now_s() + self._settings.handover_s)
        state.awaited = self._counterparts.can_be_found(state.handover, self._blocks.namespaces)
        if self._settings.store == "reused" and not is_for_another(request):
            state.store_tokens = self._reuse.seen(request.block_hashes) * self._blocks.hash_tokens
            self._reuse.note(request.block_hashes)
        self._asking.begin(state)

    def matched(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens behind those computed that can be loaded, or None: ask again; and whether other requests go on."""
        self.arrived(request)
        state = self._requests.get(request.request_id)
        if state is None:
            return 0, False
        computed = computed_tokens // self._unit * self._unit
        usable = (request.num_tokens - 1) // self._unit * self._unit  # the last token is always computed
        if usable <= computed:
            return 0, False
        if request.num_preemptions > state.preemptions:  # its blocks are gone: Quire may have them by now
            state.preemptions, state.following = request.num_preemptions, False
            self._asking.ask_again(state)
        if not state.answered and not self._asking.is_answered(state):
            return None, False
        if not self._loads:
            self._asking.give_back(state)
            return 0, False
        if state.awaited:
            limit, is_short = part_of_handover(self._blocks, state, computed, usable, self._unit)
            state.following = is_short and self._can_follow(state, computed, limit)
            if state.following:  # until vLLM has blocks for it, it asks again
                state.promised = (computed, limit - computed)
                return limit - computed, True
            if self._is_arriving(state, is_short):
                return None, False
        if state.is_leased and not self._blocks.is_current(state):
            self._asking.give_back(state)
            state.nothing_stored(storable=False)
        if state.is_leased and not self._asking.is_fresh(state):  # the lease may run out meanwhile
            self._asking.ask_again(state)
            return None, False
        tokens = self._loadable(state, computed, usable)
        if tokens <= 0:
            return 0, False
        cold_s = self._cold_s(state, computed, computed + tokens)
        is_handed_over = state.handover is not None and not cold_s  # computing it is the other engine's task
        decided = not self._settings.cut_off or is_handed_over or state.promised == (computed, tokens)
        blocks = sum(group.blocks_to_load(computed, computed + tokens) for group in self._blocks.groups)
        if not decided and not self._worth.load(blocks, tokens, cold_s):
            self._count("recomputed_blocks", blocks)
            self._try(state, computed, computed + tokens)
            self._asking.give_back(state)
            return 0, False
        state.promised = (computed, tokens)
        return tokens, self._asynchronous

    def _can_follow(self, state: State, computed: int, limit: int) -> bool:
        """Return whether a load may receive blocks while they are stored.

        It holds vLLM's blocks, and no other request waits for it. A state is no prefix; what the object tier alone has
        is loaded only if that is quicker than computing it.
        """
        handover, groups = state.handover, self._blocks.groups
        assert handover is not None, "awaited"
        is_prefix = all(group.kind is not Kind.STATE for group in groups)
        if not self._asynchronous or not is_prefix or not all(part.storable for part in state.parts):
            return False
        has_room = self._load_bytes_max is None or bytes_to_load(groups, computed, limit) <= self._load_bytes_max
        is_fresh = not state.is_leased or (self._blocks.is_current(state) and self._asking.is_fresh(state))
        is_timely = is_fresh and self._now_s() < handover.until_s
        return has_room and is_timely and not self._cold_s(state, computed, limit)

    def _is_arriving(self, state: State, is_short: bool) -> bool:
        """Look a hand-over up again from time to time; return whether blocks of it may still come."""
        handover, now_s = state.handover, self._now_s()
        assert handover is not None, "awaited"
        # The last look-up is one that began behind the deadline: vLLM may not have called for long.
        if is_short and all(part.storable for part in state.parts) and state.asked_s < handover.until_s:
            waited_s = now_s - (handover.until_s - self._settings.handover_s)
            if now_s - state.asked_s >= min(max(_AGAIN_S[0], _AGAIN_SHARE * waited_s), _AGAIN_S[1]):
                self._asking.ask_again(state)
            return True
        state.awaited = False
        self._count("handovers", 1)
        self._count("short_handovers", int(is_short))
        return False

    def _loadable(self, state: State, computed: int, usable: int) -> int:
        """Return the number of tokens behind `computed` that every group has, and that fit staging memory."""
        matched = usable
        for part, group in zip(state.parts, self._blocks.groups, strict=True):
            matched = min(matched, part.match.end * group.block_tokens if part.match is not None else 0)
        units = (matched - computed) // self._unit
        if units <= 0:
            return 0
        limit, states = self._load_bytes_max, any(group.kind is Kind.STATE for group in self._blocks.groups)
        if limit is not None and states:  # it was found at the end of what matched, and nowhere else
            return matched - computed if bytes_to_load(self._blocks.groups, computed, matched) <= limit else 0
        if limit is not None:

            def size(count: int) -> int:
                return bytes_to_load(self._blocks.groups, computed, computed + count * self._unit)

            units = bisect_right(range(1, units + 1), limit, key=size)
            while units and size(units) > limit:  # a window's part is not the same everywhere
                units -= 1
        return units * self._unit

    def _cold_s(self, state: State, computed: int, end: int) -> float:
        """Return the time that the object tier takes for the blocks that it alone has, as far as is known."""
        seconds = 0.0
        for part, group in zip(state.parts, self._blocks.groups, strict=True):
            match = part.match or RequestMatch()
            first, stop = (at // group.block_tokens - match.first for at in (computed, end))
            for lookup in match.shards:
                seconds += float(lookup.objects.seconds(stop, lookup.namespace.layout.chunk_bytes, max(0, first)))
        return seconds

    def _try(self, state: State, computed: int, end: int) -> None:
        """Measure from time to time how long loads take, with the group that has most to load."""
        group = max(self._blocks.groups, key=lambda group: group.blocks_to_load(computed, end) * group.block_bytes)
        blocks = group.blocks_to_load(computed, end)
        count = self._worth.tried(blocks, self._now_s())
        part = state.parts[group.number]
        if count and part.match is not None:
            first = end // group.block_tokens - blocks - part.match.first
            self._plan.tries.append(TryPlan(group=group.number, found=part.match.shards, first=first, count=count))
            part.match = None  # the lease is the try's

    def allocated(self, request: Any, block_ids: Blocks, tokens: int) -> None:
        """Take the blocks that vLLM has for the request; it wants `tokens` of the promised ones, or nothing."""
        state = self._requests.get(request.request_id)
        if state is None or not (state.is_leased or state.following):
            return
        if state.awaited:  # vLLM tells of its blocks again when the load has ended
            state.awaited, state.following = False, tokens > 0
            self._count("handovers", int(state.following))
        if tokens <= 0:
            self._asking.give_back(state)
            return
        computed = state.promised[0]
        end = computed + min(state.promised[1], tokens // self._unit * self._unit)
        is_handed_over = state.handover is not None and not self._cold_s(state, computed, end)
        cut_off = self._settings.cut_off and not is_handed_over
        worth_s = self._worth.compute_s(end - computed) if cut_off else 0.0
        loads = []
        for group, part, ids in zip(self._blocks.groups, state.parts, block_ids, strict=True):
            first, stop = computed // group.block_tokens, end // group.block_tokens
            while first < stop and ids[first] == NULL_BLOCK:  # in front of the window
                first += 1
            part.load_first = first
            match = part.match or RequestMatch()
            load = LoadPlan(
                request_id=request.request_id,
                group=group.number,
                found=match.shards,
                first=first - match.first,
                blocks=tuple(ids[first:stop]),
                asynchronous=self._asynchronous,
                follow=follow_plan(self._blocks, state, group, stop, self._now_s()) if state.following else None,
                worth_s=worth_s,
                priority=priority_of(request, state.hints),
                trace=state.trace,
            )
            loads.append(load)
            part.match = None  # the lease is the load's from here on
        # vLLM waits for the report of a load, even if no layer reads a block that is to be loaded.
        planned = [load for load in loads if load.blocks] or loads[:1]
        for load in loads:
            if not load.blocks and load is not planned[0]:
                self._asking.release(RequestMatch(load.found))
        self._plan.loads += planned
        if not self._asynchronous:
            self._unsettled[request.request_id] = {block for load in planned for block in load.blocks}

    def ended(self) -> None:
        """The step that was planned last has run."""
        if self._step is not None:
            started_s, tokens = self._step
            self._worth.computed(tokens, self._now_s() - started_s)
            self._step = None

    def loaded(self, loads: Sequence[LoadTime]) -> None:
        """How long loads took."""
        for blocks, seconds, cold in loads:
            self._worth.loaded(blocks, seconds, cold=cold)

    def settled(self, loads: Sequence[Settled]) -> None:
        """Take the results of loads by worker. Blocks that did not arrive in one shard are stored again in all."""
        for load in loads:
            self._unsettled.pop(load.request_id, None)
            state = self._requests.get(load.request_id)
            if state is not None and not load.arrived:
                self._count("short_handovers", int(state.following))
                state.following = False  # once, whichever shards and groups it was
            if state is not None and state.answered and not load.arrived:
                part = state.parts[load.group]
                part.stored = min(part.stored, part.load_first)
                part.states.clear()

    def unstored(self, stores: Sequence[Unstored]) -> None:
        """Take the chunks that workers did not store.

        Those without room are tried again; failed ones are not, nor those behind them.
        """
        for store in stores:
            if self._events is not None:
                self._events.unstored(store)
            state = self._requests.get(store.request_id)
            if state is not None and state.answered:
                part = state.parts[store.group]
                if store.state is not None:
                    part.states.discard(store.state)
                    continue
                part.stored = min(part.stored, store.first)
                part.storable = part.storable and store.later

    def step(
        self,
        scheduled: Sequence[tuple[str, int, int]],
        blocks_of: Callable[[str], Blocks],
        states: Mapping[str, Sequence[tuple[int, int, int]]] | None = None,
    ) -> StepPlan:
        """The plan of a step. `scheduled`: request, tokens computed before, tokens in this step.

        `states`: of each request the group and block of the states that the step completes, and the tokens up to them.
        """
        plan, self._plan = self._plan, StepPlan()
        plan.idle = not scheduled
        # A step that loads layer by layer takes as long as its loads.
        layerwise = any(not load.asynchronous for load in plan.loads)
        step_tokens = sum(tokens for *_, tokens in scheduled)
        self._step = (self._now_s(), 0 if layerwise else step_tokens)
        plan.loads = [replace(load, hidden_s=self._worth.step_s(step_tokens)) for load in plan.loads]
        if self._stores:
            for request_id, ends in (states or {}).items():  # first: without the state its blocks are of no use
                plan.stores += self._store_states(request_id, ends)
            for request_id, computed, tokens in scheduled:
                plan.stores += self._store(request_id, computed + tokens, blocks_of)
        else:
            for request_id, *_ in scheduled:
                if (state := self._requests.get(request_id)) is not None:
                    self._asking.give_back(state)  # of a look-up that ended when the request was scheduled
        if self._events is not None:
            for store in plan.stores:
                request = self._requests[store.request_id].request
                self._events.planned(request, self._blocks.groups[store.group], store)
        return plan

    def finished(self, request_id: str) -> dict[str, Any] | None:
        """Forget a request that vLLM has finished, well or not.

        Returns:
            `kv_transfer_params` of its answer; None for none.
        """
        state = self._requests.pop(request_id, None)
        self._plan.abandoned.append(request_id)
        if state is None:
            return None
        self._asking.give_back(state)
        self._carry_out_hints(state)
        if self._settings.store == "reused":  # with what was generated: the next turn begins with it
            self._reuse.note(state.request.block_hashes)
        return answer_of(state, self._blocks, stores=self._stores)

    def _carry_out_hints(self, state: State) -> None:
        """Begin what the request hints at for its prompt's whole blocks."""
        request, hints = state.request, state.hints
        prefixes: list[tuple[Namespace, ChunkKeys]] = []
        for group in () if hints.is_empty else self._blocks.groups:
            count = min(request.num_prompt_tokens // group.block_tokens, self._blocks.count(state, group))
            if not count:
                continue
            shards = zip(self._blocks.spaces(state, group), self._blocks.keys(state, group, count), strict=True)
            if group.kind is Kind.STATE:
                ends = sorted(at for at in state.parts[group.number].states if at < count)
                prefixes += [(space, keys.run(at, 1)) for space, keys in shards for at in ends]
            else:
                prefixes += shards
        if prefixes:
            self._client.spawn(carry_out(self._client.asynchronous, prefixes, hints))

    def reset(self) -> None:
        """Ignore everything that was stored before: the weights may have changed."""
        since = uuid.uuid4().hex[:16]
        self._blocks.namespaces = tuple(
            tuple(
                replace(space, weight_version=f"{space.weight_version.partition('#')[0]}#{since}") for space in shards
            )
            for shards in self._blocks.namespaces
        )
        for state in self._requests.values():
            self._asking.give_back(state)
            state.nothing_stored(storable=False)
            for part in state.parts:
                part.keys = []

    # ---- stores

    def _store(self, request_id: str, computed: int, blocks_of: Callable[[str], Blocks]) -> list[StorePlan]:
        """Plan the stores of a request that has `computed` tokens at the end of the step."""
        state = self._requests.get(request_id)
        if state is None or not (state.answered or self._asking.is_answered(state)):
            return []
        self._asking.give_back(state)  # of a look-up that ended when the request was scheduled
        computed = state.storable_tokens(computed, with_output=self._settings.store_output)
        ranges = [
            (group, part.stored, self._store_end(state, group, part, computed))
            for group, part in zip(self._blocks.groups, state.parts, strict=True)
            if part.storable and group.kind is not Kind.STATE
        ]
        ranges = [(group, first, end) for group, first, end in ranges if end > first]
        if not ranges:
            return []
        if not self._blocks.is_current(state):
            state.nothing_stored(storable=False)
            return []
        tables = blocks_of(request_id)
        stores = [self._store_plan(state, group, tables[group.number][:end], first) for group, first, end in ranges]
        return [store for store in stores if store is not None]

    def _store_end(self, state: State, group: Group, part: RequestPart, computed: int) -> int:
        """Return the end of the blocks that a step may store: they have names, and fit the group's share of memory."""
        room = max(1, self._staged_bytes_max // len(self._blocks.groups) // group.block_bytes)
        return min(computed // group.block_tokens, self._blocks.count(state, group), part.stored + room)

    def _store_plan(self, state: State, group: Group, blocks: Sequence[int], first: int) -> StorePlan | None:
        """Plan one store; None where blocks may have to be recomputed, or have left their window."""
        part = state.parts[group.number]
        waits = any(not unsettled.isdisjoint(blocks) for unsettled in self._unsettled.values())
        if waits or len(blocks) <= first:
            return None
        if NULL_BLOCK in blocks[first:]:  # they have left the window; what comes behind them would have no parent
            part.storable = False
            return None
        part.stored = len(blocks)
        return StorePlan(
            request_id=state.request.request_id,
            group=group.number,
            namespaces=self._blocks.spaces(state, group),
            keys=self._blocks.keys(state, group, len(blocks)),
            known=part.looked_up,
            first=first,
            blocks=tuple(blocks[first:]),
            handed_over=is_for_another(state.request),
            trace=state.trace,
        )

    def _store_states(self, request_id: str, ends: Sequence[tuple[int, int, int]]) -> list[StorePlan]:
        """Plan a store for each state that Quire has not, at the end of a block with a name."""
        state, stores = self._requests.get(request_id), []
        if state is None or not state.answered or not self._blocks.is_current(state):
            return []
        ends = [end for end in ends if end[2] == state.storable_tokens(end[2], with_output=self._settings.store_output)]
        for number, block, tokens in ends:
            group, part = self._blocks.groups[number], state.parts[number]
            at, inside = tokens // group.block_tokens - 1, tokens % group.block_tokens
            if inside or at in part.states or not part.storable or at >= self._blocks.count(state, group):
                continue
            part.states.add(at)
            keys = self._blocks.keys(state, group, at + 1)
            store = StorePlan(
                request_id=request_id,
                group=number,
                namespaces=self._blocks.spaces(state, group),
                keys=tuple(shard.run(at, 1) for shard in keys),
                known=0,
                first=0,
                blocks=(block,),
                state=at,
                handed_over=is_for_another(state.request),
                trace=state.trace,
            )
            stores.append(store)
        return stores
