"""Tenants first, requests second: a tenant's requests can never cost another its share of the pool.

The budget is divided among the tenants with demands by weighted max-min fairness (water filling): none gets more than
it can use before all others have their shares, and the unused rest goes to the others by weight. A tenant's demand is
the sum of its targets, so wrong windows raise the demand, and not the share. A tenant's part goes to its priorities,
the highest first. A tenth is set aside for all that are not the highest, by the number of their requests, so that none
of them stands still. The policy divides the bandwidth of a priority among its requests.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from quire_scheduler.core.policy import Demand, Policy, Rates

_Sharer = TypeVar("_Sharer", bound=Hashable)
_LOWER_SHARE = 0.1


def allocate(policy: Policy, demands: Sequence[Demand], budget: float, margin: float) -> Rates:
    """A rate for each demand: together at most `budget`, each tenant's at most its cap and its fair part."""
    rates = np.zeros(len(demands))
    members = _by_tenant(demands)
    parts = _parts(demands, members, budget, margin)
    for tenant, indices in members.items():
        effort = 1 / len(members)
        for same, part in _by_priority(demands, indices, parts[tenant], margin):
            rates[same] = policy.allocate([demands[index] for index in same], part, effort * len(same) / len(indices))
    return rates


def allocate_last(policy: Policy, demands: Sequence[Demand], budget: float, margin: float) -> float:
    """Return the rate that `allocate` gives the last demand, without the work for other tenants."""
    members = _by_tenant(demands)
    tenant = demands[-1].tenant
    part = _parts(demands, members, budget, margin)[tenant]
    for same, share in _by_priority(demands, members[tenant], part, margin):
        if same[-1] == len(demands) - 1:
            effort = len(same) / len(members[tenant]) / len(members)
            return float(policy.allocate([demands[index] for index in same], share, effort)[-1])
    raise AssertionError("every demand has a priority")


def _by_priority(
    demands: Sequence[Demand], indices: Sequence[int], part: float, margin: float
) -> list[tuple[list[int], float]]:
    """Divide a tenant's part among its priorities, the highest first: indices of demands, and their bytes per second.

    Bandwidth that no priority needs goes to the highest: some policies use it.
    """
    groups: dict[int, list[int]] = {}
    for index in indices:
        groups.setdefault(demands[index].priority, []).append(index)
    order = [groups[priority] for priority in sorted(groups, reverse=True)]
    needs = [sum(demands[index].zero_stall_rate + margin for index in same) for same in order]
    share = _LOWER_SHARE * part / max(1, len(indices) - len(order[0]))
    rates = [min(need, share * len(same)) for need, same in zip(needs, order, strict=True)]
    rates[0] = 0.0
    rest = part - sum(rates)
    for at, need in enumerate(needs):
        increase = min(need - rates[at], rest)
        rates[at] += increase
        rest -= increase
    rates[0] += rest
    return list(zip(order, rates, strict=True))


def _by_tenant(demands: Sequence[Demand]) -> dict[str, list[int]]:
    members: dict[str, list[int]] = {}
    for index, demand in enumerate(demands):
        members.setdefault(demand.tenant, []).append(index)
    return members


def _parts(
    demands: Sequence[Demand], members: Mapping[str, list[int]], budget: float, margin: float
) -> dict[str, float]:
    return shares(_claims(demands, members, margin), budget)


def claim(demands: Sequence[Demand], margin: float) -> tuple[float, float, float]:
    """Return the sum of their demands, the weight of their tenants, and the tenants' caps."""
    claims = _claims(demands, _by_tenant(demands), margin).values()
    return (
        sum(min(claimed, cap) for claimed, _, cap in claims),
        sum(weight for _, weight, _ in claims),
        sum(cap for _, _, cap in claims),
    )


def _claims(
    demands: Sequence[Demand], members: Mapping[str, list[int]], margin: float
) -> dict[str, tuple[float, float, float]]:
    """Return (wanted, weight, cap) by tenant; weight and cap are those of its latest demand."""
    tenants = {}
    for tenant, indices in members.items():
        needed = sum(demands[index].zero_stall_rate + margin for index in indices)
        latest = demands[indices[-1]]
        tenants[tenant] = (needed, latest.weight, latest.cap_bytes_per_s or math.inf)
    return tenants


def shares(sharers: Mapping[_Sharer, tuple[float, float, float]], budget: float) -> dict[_Sharer, float]:
    """Divide `budget` among tenants, or among links, given as (wanted, weight, cap).

    First up to their demands; the rest is divided by weight too, up to the caps: some policies use it.
    """
    capped = {name: min(want, cap) for name, (want, _, cap) in sharers.items()}
    weights = {name: weight for name, (_, weight, _) in sharers.items()}
    first = _fill(capped, weights, budget)
    room = {name: cap - first[name] for name, (_, _, cap) in sharers.items()}
    rest = _fill(room, weights, max(0.0, budget - sum(first.values())))
    return {name: first[name] + rest[name] for name in sharers}


def _fill(limits: Mapping[_Sharer, float], weights: Mapping[_Sharer, float], budget: float) -> dict[_Sharer, float]:
    """Weighted water filling: part_i = min(limit_i, λ·w_i), Σ part_i = min(budget, Σ limit_i)."""
    parts, remaining, weight_left = dict.fromkeys(limits, 0.0), budget, sum(weights.values())
    for name in sorted(limits, key=lambda name_: limits[name_] / weights[name_]):
        parts[name] = max(0.0, min(limits[name], remaining * weights[name] / weight_left))
        remaining -= parts[name]
        weight_left -= weights[name]
        if weight_left <= 0:
            break
    return parts
