"""Checkpoints within checkpoints: the least recomputation for a given number of checkpoints on a
chain of equal steps.

Treeverse (Griewank 1992; as *revolve*, Griewank and Walther 2000, ACM Algorithm 799) reverses a
chain of N steps with s checkpoints, including the input. If no step is advanced over more than r
times, at most C(s + r, s) steps can be reversed. Treeverse sets the first checkpoint so that the
steps before it need r − 1 more advances, and the steps behind it s − 1 checkpoints. It divides both
parts likewise. That takes r·N − C(s + r, s + 1) advances for the least such r, and no schedule
takes fewer. If s is about log₂(N), so is r: a chain of a thousand steps needs the memory of two
dozen.

The graph is cut into stages (:mod:`~memsaving_gradients.planners.chains.stages`), which count as
equal steps. Within a budget, the planner takes the most checkpoints whose simulated peak fits: more
checkpoints need fewer advances. Optimal for equal stages, with peaks that grow with the number of
checkpoints. For unequal stages, :mod:`~memsaving_gradients.planners.chains.chain` is optimal, but
takes time with their third power. Cost: log₂(N) schedules, each linear in its steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from memsaving_gradients.planners.chains.chain import record
from memsaving_gradients.planners.chains.rotor import Action
from memsaving_gradients.planners.chains.stages import Stages, cut_stages
from memsaving_gradients.planners.proposal import Interrupted, Limits, Proposal, proposed, untouched
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["levels", "plan", "reversal"]


def plan(graph: TrainingGraph, limits: Limits = Limits()) -> Proposal:
    """Return the plan of this recursion with the fewest recomputations within the budget; without
    one, the plan with about log₂(N) checkpoints for N stages."""
    plain = untouched(graph, limits)
    if plain.optimal:
        return plain
    stages: Stages = graph.derived(cut_stages, frozenset(limits.keep), graph.length)
    length = len(stages.histories)
    if limits.budget is None:
        trial = _recursion(graph, limits, stages, math.ceil(math.log2(max(length, 2))))
        return min(plain, trial, key=lambda proposal: proposal.peak)
    # With `low` checkpoints the plan fits (unknown for 0), with `high` it does not.
    low, high = 0, length + 1
    best = plain
    try:
        while high - low > 1:
            slots = (low + high) // 2
            trial = _recursion(graph, limits, stages, slots)
            if trial.peak <= limits.budget:
                best, low = trial, slots
            else:
                best = best if low else min(best, trial, key=lambda proposal: proposal.peak)
                high = slots
            if limits.progress is not None:
                limits.progress(1 - (high - low) / (length + 1), "choosing checkpoints")
    except Interrupted:
        return replace(best, complete=False)
    return best


def levels(steps: int, slots: int) -> int:
    """Return the least number of times that steps must be advanced over, with ``slots``
    checkpoints, including the input.

    Examples
    --------
    >>> [levels(1024, slots) for slots in (1, 10, 32, 44, 1023)]
    [1023, 5, 3, 2, 1]
    """
    r = 0
    while math.comb(slots + r, slots) < steps:
        r += 1
    return r


def reversal(steps: int, slots: int) -> Iterator[Action]:
    """Yield the actions of Treeverse, in order."""
    todo = [(0, steps, slots)]
    while todo:
        first, last, free = todo.pop()
        if last - first == 1 or free == 1:
            for stage in range(last - 1, first - 1, -1):
                yield Action("history", stage)
                yield Action("backward", stage)
            continue
        middle = first + _before_checkpoint(last - first, free)
        yield Action("keep", middle)
        todo += [(first, middle, free), (middle, last, free - 1)]


def _before_checkpoint(steps: int, slots: int) -> int:
    """Return how many of ``steps`` come before the next checkpoint; both arguments ≥ 2."""
    r = levels(steps, slots)
    # Behind it: at least as many steps as r − 1 advances suffice for, so that no step before it
    # needs more advances.
    behind = math.comb(slots + r - 2, slots - 1)
    return max(1, min(math.comb(slots + r - 1, slots), steps - behind))


def _recursion(graph: TrainingGraph, limits: Limits, stages: Stages, slots: int) -> Proposal:
    actions = _actions(stages, slots)
    return proposed(graph, limits, record(graph, stages, actions, limits.sums(graph)))


def _actions(stages: Stages, slots: int) -> Iterator[Action]:
    """Yield the reversal of all stages; stages at the end that keep nothing turn back together with
    the last stage that keeps something."""
    whole = len(stages.histories)
    length = max((k + 1 for k in range(whole) if stages.histories[k][0]), default=1)
    behind = [Action("backward", stage) for stage in range(whole - 1, length - 1, -1)]
    for action in reversal(length, slots):
        yield action
        if action.kind == "history":
            yield from behind
            behind = []
