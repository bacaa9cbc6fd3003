"""The state of a tiny cluster, and what a node's machine asks for."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.model.durability import Durability
from quire_storage.core.chunks import Chunk, Copy
from quire_storage.core.pool.format import PAGE_BYTES, DriveGeometry
from quire_storage.core.pool.map import PoolMap
from quire_storage.core.pool.slots import SlotAllocator
from quire_storage.core.residency import Residency, ResidencySettings
from quire_storage.core.residency import events as ev
from tests.simulation.exhaustive.model import KEYS, LEASE, NAMED, SLAB, Client, Node, Scenario, Step, TinyIndex, now


class State:
    """One state. `promises`: what was acknowledged: generation and level, by key."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.index = TinyIndex()
        self.objects: dict[tuple[bytes, int], Chunk] = {}
        self.nodes = [Node(0), Node(1)]
        self.steps: list[Step] = []
        self.clients = [Client(script) for script in scenario.clients]
        self.promises: dict[bytes, tuple[int, Durability]] = {}
        self.crashes, self.losses = scenario.crashes, scenario.losses
        self.sweeps, self.emptied = scenario.sweeps, scenario.emptied
        self.damaged = False
        self.tickets = NAMED

    def answered(self, node: Node, ticket: int, value: Any) -> None:
        """A ticket is answered: who waited for it goes on."""
        for at, step in enumerate(self.steps):
            if step.what == "wait" and (step.node, step.arguments[2]) == (node.number, ticket):
                number, transfer, _ = step.arguments
                self.steps[at] = Step("acknowledge", step.node, step.incarnation, (number, transfer, ticket, value))
                return
            if step.what == "wait to reregister" and (step.node, step.arguments[0]) == (node.number, ticket):
                self.steps[at] = Step("reregistered", step.node, step.incarnation, (ticket,))
                return

    def read_from(self, node: Node, copy: Copy) -> int | None:
        if copy.memory is not None:
            return node.memory.get(copy.memory.offset)
        assert copy.disk is not None
        return node.disk.get(copy.disk.offset)

    def boot(self, node: Node) -> None:
        node.incarnation += 1
        node.memory, node.unsent, node.sending, node.arriving = {}, {}, set(), {}
        pool = None
        if self.scenario.drives:
            geometry = DriveGeometry(SLAB, 2, 2)
            if node.image is None:
                node.image = np.zeros(geometry.header_pages * PAGE_BYTES, dtype=np.uint8)
            pool = PoolMap([geometry], [node.image.copy()], 4096)
            pool.recover(0, geometry.header_pages)
        arena = SlotAllocator(self.scenario.slabs * SLAB, SLAB)
        node.residency = Residency(ResidencySettings(), arena, pool, objects=True)

    def reconcile(self, node: Node) -> None:
        self.later("take drops", node)

    def post(self, node: Node, event: ev.Event) -> None:
        assert node.residency is not None
        for instruction in node.residency.handle(event, 0.0):
            self.carry_out(node, instruction)

    def ask(self, node: Node, ticket: int, event: ev.Event) -> Any:
        """The answer of a ticket that is answered at once; None if it is not."""
        assert node.residency is not None
        answer = None
        for instruction in node.residency.handle(event, 0.0):
            if isinstance(instruction, ev.Complete) and instruction.ticket == ticket:
                answer = instruction.value
            else:
                self.carry_out(node, instruction)
        return answer

    def carry_out(self, node: Node, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Complete(ticket, value):
                self.answered(node, ticket, frozenset(value) if isinstance(value, set) else value)
            case ev.Fail(ticket, _):
                self.answered(node, ticket, None)
            case ev.Write():
                self.later("write", node, instruction)
            case ev.WriteHeaders():
                self.pool(node).commit(list(instruction.placed))
                self.later("headers written", node, instruction)
            case ev.Forget():
                self.pool(node).forget(list(instruction.placed))
                self.later("forgotten", node, instruction)
            case ev.Register(ticket, records, _, fresh, within, in_object):
                self.later("register", node, ticket, tuple(records), fresh, tuple(within), in_object)
            case ev.Withdraw(records, hidden):
                self.later("withdraw", node, tuple(records), hidden)
            case ev.AskToEvict(question, records):
                self.later("ask to evict", node, question, tuple(records))
            case ev.AskToWithdraw(question, records):
                self.later("ask to withdraw", node, question, tuple(records))
            case ev.Upload(key, _, _):
                if key not in node.unsent and key not in node.sending:
                    node.unsent[key] = None
                    self.later("upload", node, key)
            case ev.CancelUpload(key):
                if key in node.unsent:
                    del node.unsent[key]
                    self.steps = [each for each in self.steps if not _is_upload(each, node, key)]

    def pool(self, node: Node) -> PoolMap:
        assert node.residency is not None and node.residency.pool is not None
        return node.residency.pool

    def later(self, what: str, node: Node | None, *arguments: Any) -> None:
        number, incarnation = (node.number, node.incarnation) if node is not None else (0, 0)
        self.steps.append(Step(what, number, incarnation, arguments))

    def ticket(self) -> int:
        self.tickets += 1
        return self.tickets

    def operation(self, number: int) -> Any:
        return self.clients[number].script[self.clients[number].at]

    def let_go(self, number: int) -> None:
        for key in KEYS:
            now(self.index.unpin(KEYS[0], key, LEASE + bytes([number])))

    def end(self, number: int) -> None:
        self.clients[number].at += 1
        self.clients[number].running = False


def _is_upload(step: Step, node: Node, key: bytes) -> bool:
    mine = (step.what, step.node, step.incarnation) == ("upload", node.number, node.incarnation)
    return mine and step.arguments == (key,)
