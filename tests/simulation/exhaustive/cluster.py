"""A tiny cluster: what may happen next, what happens then, and whether every promise still holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from quire.model.durability import Durability
from quire.model.index import OBJECT_TIER
from quire.testing.index import IndexState
from quire_storage.core.residency import events as ev
from quire_storage.core.residency.invariants import check, under_way
from tests.simulation.exhaustive.model import (
    KEYS,
    RECORDS,
    Broken,
    Client,
    Evict,
    Follow,
    Node,
    Read,
    Scenario,
    Step,
    Store,
    names_of,
    now,
    told,
)
from tests.simulation.exhaustive.steps import Steps


class Cluster(Steps):
    """One state, with what was done `before` behind it."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        for node in self.nodes:
            self.boot(node)
        before = Client(scenario.before)
        self.clients.append(before)
        while before.at < len(before.script):
            self.begin(len(self.clients) - 1)
            self.settle()
        self.clients.pop()

    # ---- what may happen next

    def choices(self) -> Iterator[tuple[str, ...]]:
        for number, client in enumerate(self.clients):
            if not client.running and client.at < len(client.script):
                yield ("begin", str(number))
        for at, step in enumerate(self.steps):
            if self.may(step):
                yield ("step", str(at))
                if self.losses and step.what in _ANSWERS:
                    yield ("lose", str(at))
        for node in self.nodes:
            if node.residency is None:
                yield ("restart", str(node.number))
            elif self.crashes:
                yield ("crash", str(node.number))
        if self.sweeps and self.index.state.objects and not self.is_writing():
            yield ("sweep",)
        if self.emptied:
            yield ("empty",)

    def is_writing(self) -> bool:
        """Whether an object is being written: that takes less than the time of grace."""
        alive = {(node.number, node.incarnation) for node in self.nodes}
        return any(step.what in _WRITING and (step.node, step.incarnation) in alive for step in self.steps)

    @property
    def is_over(self) -> bool:
        return not self.steps and all(client.at == len(client.script) for client in self.clients)

    def take(self, choice: tuple[str, ...]) -> str:
        """Let it happen, and look at every promise; what happened, in words."""
        what = " ".join(choice)
        match choice:
            case ("begin", number):
                what = f"client {number} begins {self.clients[int(number)].script[self.clients[int(number)].at]}"
                self.begin(int(number))
            case ("step", at):
                step = self.steps.pop(int(at))
                what = told(step)
                self.take_step(step)
            case ("lose", at):
                step = self.steps.pop(int(at))
                what = f"lost: {told(step)}"
                self.losses -= 1
                self.lose(step)
            case ("crash", number):
                self.crashes -= 1
                self.crash(self.nodes[int(number)])
            case ("restart", number):
                self.boot(self.nodes[int(number)])
                self.reconcile(self.nodes[int(number)])
            case ("sweep",):
                self.sweeps -= 1
                self.sweep()
            case ("empty",):
                self.emptied -= 1
                self.empty()
        self.check()
        return what

    def check(self) -> None:
        for node in self.nodes:
            if node.residency is not None:
                check(node.residency)
        if not self.damaged:
            for key, (generation, level) in self.promises.items():
                self.check_promise(key, generation, level)

    def settle(self) -> None:
        """Let everything that is under way come to its end, in the order in which it began."""
        for _ in range(500):
            ready = next((step for step in self.steps if self.may(step)), None)
            if ready is None:
                assert not self.steps, f"it never ends: {self.steps}"
                return
            self.steps.remove(ready)
            self.take_step(ready)
        raise Broken(f"it never ends: {[told(step) for step in self.steps]}")

    def finish(self) -> None:
        """Everything is over: what is left of it."""
        for node in self.nodes:
            if node.residency is None:
                self.boot(node)
        for round_ms in (4, 6, 8):
            for node in self.nodes:
                self.post(node, ev.TimePassed())
                self.reconcile(node)
            self.settle()
            self.sweep(round_ms)
            self.settle()
        self.damaged = False
        self.check()
        self.check_agreement()

    def check_agreement(self) -> None:
        listed = self.index.state.entries
        for node in self.nodes:
            assert node.residency is not None
            if left := under_way(node.residency):
                raise Broken(f"{node.name} is left with {left}")
            here, there = set(node.residency.keys()), {key for key, each in listed.items() if node.name in each.nodes}
            orphans = {record.key for record in RECORDS if record.parent and record.parent not in listed}
            if here - orphans != there:
                raise Broken(f"{node.name} has {names_of(here)} and is listed for {names_of(there)}")
        hollow = [key for key, entry in listed.items() if not entry.nodes and not entry.children]
        if hollow:
            raise Broken(f"nothing holds {names_of(hollow)}, which pins its parents")
        objects = {key for key, each in listed.items() if OBJECT_TIER in each.nodes}
        there = {key for key, _ in self.objects}
        if objects != there:
            raise Broken(f"objects {names_of(there)}, listed {names_of(objects)}")
        if self.index.state.pins:
            raise Broken("leases are left")

    def check_promise(self, key: bytes, generation: int, level: Durability) -> None:
        entry = self.index.state.entries.get(key)
        if entry is None or entry.generation != generation:
            raise Broken(f"{names_of([key])} was acknowledged, was not evicted, and is not indexed")
        alive = {node.name: node.residency for node in self.nodes if node.residency is not None}
        holders = [name for name in entry.nodes if name in alive and key in alive[name]]
        in_object = OBJECT_TIER in entry.nodes and any(key == each for each, _ in self.objects)
        down = level is Durability.LOCAL and len(alive) < len(self.nodes)
        if not holders and not in_object and not down:
            raise Broken(f"{names_of([key])} was acknowledged, and none of {entry.nodes} has it")
        if level is Durability.OBJECT and not in_object:
            raise Broken(f"{names_of([key])} was acknowledged in the object tier, and is not there")

    def begin(self, number: int) -> None:
        client = self.clients[number]
        client.running = True
        match client.script[client.at]:
            case Store(node) if self.nodes[node].residency is not None:
                self.ingest(self.nodes[node], number)
            case Follow(node) if self.nodes[node].residency is not None:
                self.follow(self.nodes[node], number)
            case Evict(keep):
                self.evict(number, keep)
            case Read(node):
                self.look_up(number, node)
            case _:
                self.end(number)

    def may(self, step: Step) -> bool:
        """Whether a step can be taken now."""
        if step.what.startswith("wait"):
            return False
        node = self.nodes[step.node]
        if step.what == "followed":  # a layer is sent when it has arrived
            running = [node.arriving[transfer] for transfer, _, _ in step.arguments[3] if transfer in node.arriving]
            return all(has_arrived for _, _, has_arrived in running)
        if step.what == "acknowledge" and isinstance(step.arguments[3], frozenset):
            store = self.operation(step.arguments[0])
            on_its_way = {*node.unsent, *node.sending}
            return store.level is not Durability.OBJECT or not on_its_way & set(KEYS[: store.count])
        return True

    def take_step(self, step: Step) -> None:
        node = self.nodes[step.node]
        there = node.residency is not None and node.incarnation == step.incarnation
        if step.incarnation and step.what not in _ELSEWHERE and not there:
            return  # the process that it belongs to has ended
        before = len(self.steps)
        _STEPS[step.what](self, *((node,) if step.incarnation else ()), *step.arguments)
        if step.incarnation and not there:  # the receiver of the answer is gone
            self.steps[before:] = [each for each in self.steps[before:] if not each.incarnation]

    def lose(self, step: Step) -> None:
        """A message is lost: its sender sees a failure."""
        node = self.nodes[step.node]
        if step.what == "drop":
            self.drop_unanswered(*step.arguments)
        elif node.residency is not None and node.incarnation == step.incarnation:
            _ANSWERS[step.what](self, node, *step.arguments)

    def sweep(self, now_ms: int = 2) -> None:
        claimed = now(self.index.claim_objects(now_ms, now_ms + 1, 10))
        if claimed:
            self.steps.append(Step("delete objects", 0, 0, (tuple(claimed), now_ms + 1)))

    def empty(self) -> None:
        drawn = self.index.drawn
        self.index.state = IndexState(epoch="second")
        self.index.drawn = drawn + 1_000
        self.damaged = True
        self.promises = {key: (0, level) for key, (_, level) in self.promises.items() if level is Durability.OBJECT}
        for node in self.nodes:
            if node.residency is not None:
                self.reconcile(node)
        self.steps.append(Step("rebuild", 0, 0, ()))

    def crash(self, node: Node) -> None:
        node.residency = None
        weak = {Durability.MEMORY} if self.scenario.drives else {Durability.MEMORY, Durability.LOCAL}
        self.promises = {key: each for key, each in self.promises.items() if each[1] not in weak}
        for step in [each for each in self.steps if each.node == node.number and each.incarnation == node.incarnation]:
            if step.what in _OF_CLIENTS:
                self.steps.remove(step)
                self.let_go(step.arguments[0])
                self.end(step.arguments[0])
            elif step.what not in _ELSEWHERE:
                self.steps.remove(step)


_STEPS: Final[dict[str, Callable[..., None]]] = {
    "pulled": Cluster.pulled,
    "acknowledge": Cluster.acknowledge,
    "deliver": Cluster.deliver,
    "followed": Cluster.followed,
    "read": Cluster.read,
    "register": Cluster.register,
    "registered": Cluster.registered,
    "withdraw": Cluster.withdraw,
    "withdrawn": lambda self, node, keys: self.post(node, ev.Withdrawn(keys)),
    "ask to evict": Cluster.ask_to_evict,
    "ask to withdraw": Cluster.ask_to_withdraw,
    "answered": lambda self, node, question, out: self.post(node, ev.Answered(question, out)),
    "drop": Cluster.drop,
    "upload": Cluster.upload,
    "ask for object": Cluster.ask_for_object,
    "object asked for": Cluster.object_asked_for,
    "expect object": Cluster.expect_object,
    "object expected": Cluster.object_expected,
    "put": Cluster.put,
    "list object": Cluster.list_object,
    "object listed": Cluster.object_listed,
    "load": Cluster.load,
    "loaded": Cluster.loaded,
    "write": Cluster.write,
    "headers written": Cluster.headers_written,
    "forgotten": Cluster.forgotten,
    "delete objects": Cluster.delete_objects,
    "objects deleted": Cluster.objects_deleted,
    "rebuild": Cluster.rebuild,
    "take drops": Cluster.take_drops,
    "compare": Cluster.compare,
    "compared": Cluster.compared,
    "reregistered": Cluster.reregistered,
}
# Requests that reach the index or the object tier although the process that sent them has ended.
_ELSEWHERE: Final = frozenset(
    {
        "register",
        "withdraw",
        "ask to evict",
        "ask to withdraw",
        "ask for object",
        "expect object",
        "put",
        "list object",
    }
)
_WRITING: Final = frozenset({"object expected", "put", "list object"})
_OF_CLIENTS: Final = frozenset({"pulled", "wait", "acknowledge", "deliver", "followed", "load", "loaded", "read"})
# What the one who waits hears when the request, or its answer, is lost.
_ANSWERS: Final[dict[str, Callable[..., None]]] = {
    "drop": Cluster.drop_unanswered,
    "register": lambda self, node, ticket, *_: self.registered(node, ticket, None),
    "registered": lambda self, node, ticket, generations: self.registered(node, ticket, None),
    "withdraw": lambda self, node, records, hidden: self.post(node, ev.Withdrawn([record.key for record in records])),
    "ask to evict": lambda self, node, question, records: self.post(node, ev.Answered(question, frozenset())),
    "ask to withdraw": lambda self, node, question, records: self.post(node, ev.Answered(question, frozenset())),
    "answered": lambda self, node, question, out: self.post(node, ev.Answered(question, frozenset())),
    "ask for object": lambda self, node, chunk, generation: self.again(node, chunk.key),
    "object asked for": lambda self, node, chunk, generation, listed: self.again(node, chunk.key),
    "expect object": lambda self, node, chunk, generation: self.again(node, chunk.key),
    "object expected": lambda self, node, chunk, generation, kept: self.again(node, chunk.key),
    "put": lambda self, node, chunk, generation: self.again(node, chunk.key),
    "list object": lambda self, node, chunk, generation: self.again(node, chunk.key),
    "object listed": lambda self, node, chunk, generation, mark: self.again(node, chunk.key),
    "load": lambda self, node, number, ticket, copies, missing: self.read(node, number, ticket, (copies, missing)),
    "loaded": lambda self, node, *arguments: self.loaded(node, *arguments[:-2], (), {}),
}
