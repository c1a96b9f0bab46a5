"""Round decisions that nearly meet a budget, so that they meet it and use it up.

Prices weigh many values at once; whether the last bytes fit depends on single values. *Repair*
drops, at the step with the most bytes, the values that are cheapest to recompute for their bytes,
until the peak is within the budget. *Fill* keeps values again where the budget has room over their
whole gap, the dearest first, many at a time. Both simulate each change exactly, and return the
last simulation that they accepted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from memsaving_gradients.planners.prices.gaps import Gaps
from memsaving_gradients.planners.retention.problem import DROPPED, KEPT
from memsaving_gradients.planners.retention.simulate import Run
from memsaving_gradients.schedules.arrays import IntArray

__all__ = ["Simulate", "fill", "profile", "repair"]

Simulate = Callable[[list[int]], Run]


def profile(gaps: Gaps, run: Run) -> IntArray:
    """Return the most bytes alive in each event of a run."""
    most = np.zeros(gaps.events, np.int64)
    np.maximum.at(most, np.array(run.event, np.int64), run.bytes_alive)
    return most


def repair(
    gaps: Gaps, simulate: Simulate, decisions: list[int], run: Run, budget: int, most: int
) -> tuple[list[int], Run]:
    """Drop the values that cost least at the worst step, in at most ``most`` rounds; the result is
    above the budget if that does not help."""
    for _ in range(most):
        if run.peak <= budget:
            break
        step = int(np.argmax(run.bytes_alive))
        over = int(run.bytes_alive[step]) - budget
        ranked = _droppable(gaps, decisions, run, step, over)
        if not ranked:
            break
        sizes = np.cumsum(gaps.size[[gap for _, gap in ranked]])
        enough = int(np.searchsorted(sizes, over)) + 1
        excess = run.excess(budget)
        for many in dict.fromkeys((min(enough, len(ranked)), 1)):
            trial = decisions.copy()
            for _, gap in ranked[:many]:
                trial[gap] = DROPPED
            found = simulate(trial)
            # Dropping all at once may recompute so much that the peak moves: then try the cheapest.
            if found.peak < run.peak or found.excess(budget) < excess:
                decisions, run = trial, found
                break
        else:
            break
    return decisions, run


def _droppable(
    gaps: Gaps, decisions: list[int], run: Run, step: int, over: int
) -> list[tuple[float, int]]:
    """Return the kept gaps whose values are idle at a step, each with its seconds per byte; the
    cheapest first."""
    event = run.event[step]
    busy = {*gaps.problem.reads[event], *gaps.problem.writes[event]}
    alive = (np.array(run.born) <= step) & (np.array(run.last) >= step)
    found = []
    for value in {run.value[k] for k in np.flatnonzero(alive).tolist()} - busy:
        gap = gaps.problem.gap_at(value, event)
        if gaps.open[gap] and decisions[gap] == KEPT:
            size = int(gaps.size[gap])
            found.append((_seconds_again(gaps, gap, decisions) / min(size, max(over, 1)), gap))
    return sorted(found)


def _seconds_again(gaps: Gaps, gap: int, decisions: list[int]) -> float:
    """Return the seconds to recompute the value of a gap and the dropped tails that it needs."""
    if gap not in gaps.inputs:
        return 0.0
    cost, seen, stack = 0.0, {gap}, [gap]
    while stack:
        reader = stack.pop()
        cost += float(gaps.seconds[reader])
        for other in gaps.inputs.get(reader, ()):
            if gaps.tail[other] and decisions[other] != KEPT and other not in seen:
                seen.add(other)
                stack.append(other)
    return cost


def fill(
    gaps: Gaps, simulate: Simulate, decisions: list[int], run: Run, budget: int
) -> tuple[list[int], Run]:
    """Keep values again where there is room; the result is within the budget if ``run`` is."""
    refused: set[int] = set()
    changed = True
    while changed and (chosen := _keepable(gaps, decisions, run, budget, refused)):
        changed = False
        # Recomputing a value earlier than before may take more bytes than there is room for.
        parts = [chosen]
        while parts:
            part = parts.pop()
            trial = decisions.copy()
            for gap in part:
                trial[gap] = KEPT
            found = simulate(trial)
            if found.peak <= budget and found.extra_seconds <= run.extra_seconds:
                decisions, run, changed = trial, found, True
            elif len(part) == 1:
                refused.update(part)
                changed = True
            elif part is chosen:
                parts = [part[len(part) // 2 :], part[: len(part) // 2]]
    return decisions, run


def _keepable(
    gaps: Gaps, decisions: list[int], run: Run, budget: int, refused: set[int]
) -> list[int]:
    """Return the dropped gaps over which the budget has room for all of their values together."""
    slack = budget - profile(gaps, run)
    event = np.array(run.event, np.int64)
    born = event[np.array(run.born, np.int64)]
    gap = np.array(run.gap, np.int64)
    again = gaps.open[gap] & (born > gaps.begin[gap]) & (born >= gaps.problem.border)
    first: dict[int, int] = {}
    for key, when in zip(gap[again].tolist(), born[again].tolist(), strict=True):
        first.setdefault(key, when)
    ranked = sorted(
        (key for key in first if decisions[key] != KEPT and key not in refused),
        key=lambda key: (-gaps.seconds[key] / gaps.size[key], key),
    )
    chosen = []
    for key in ranked:
        between = slack[int(gaps.begin[key]) + 1 : first[key] + 1]
        if not len(between) or between.min() >= gaps.size[key]:
            between -= gaps.size[key]
            chosen.append(key)
    return chosen
