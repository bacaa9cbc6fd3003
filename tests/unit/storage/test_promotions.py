"""Promotions are shared by deliveries: one that is being given up is joined by none."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from quire_storage.delivery import promotions as module
from quire_storage.delivery.promotions import Promotions


@dataclass
class _Tiers:
    """All copies belong to promotion 7, as long as it has a holder; what was ended, and how."""

    tickets: int = 0
    ended: list[tuple[int, int, bool]] = field(default_factory=list)

    def promote(self, copies: Any, *, prefetch: bool) -> tuple[int, dict[int, tuple[int, str]]]:
        self.tickets += 1
        return self.tickets, {copy.number: (7, f"place {copy.number}") for copy in copies}

    def end_promotion(self, ticket: int, promotion: int, *, complete: bool) -> None:
        self.ended.append((ticket, promotion, complete))


class _Promotion:
    """Its reads take until `still` is set."""

    def __init__(self, reading: Any, number: int, copies: Any, places: Any, tenant: str) -> None:
        self.number, self.copies = number, copies
        self.complete = False
        self.still = asyncio.Event()

    async def settle(self) -> None:
        await self.still.wait()


async def test_copies_of_a_promotion_that_is_being_given_up_are_read_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second delivery had joined it with fewer copies; when it was through, all of them counted as read."""
    monkeypatch.setattr(module, "Promotion", _Promotion)
    tiers, promotions = _Tiers(), Promotions()
    reading: Any = SimpleNamespace(tiers=tiers)
    copies: Any = [SimpleNamespace(number=number) for number in range(4)]
    first, joined = promotions.join(reading, copies)
    promotion: Any = joined[0][0]
    leaving = asyncio.create_task(promotions.leave(tiers, first, promotion))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    second, found = promotions.join(reading, copies[:2])
    assert found == {} and tiers.ended == [(second, 7, False)]
    promotion.still.set()
    await leaving
    assert tiers.ended == [(second, 7, False), (first, 7, False)]
    _, again = promotions.join(reading, copies[:2])
    assert again[0][0] is not promotion, "afterwards it is a new one"
