"""Decisions for a search to begin with, beside those of plain training.

Two kinds: what the programs of :mod:`~memsaving_gradients.planners.bounds.integer` run again for
the most crowded moments, which is the best there is where these decide; and the cuts of
:mod:`~memsaving_gradients.planners.least_memory`, with and without the outputs of expensive ops,
which are good where a network falls into blocks. Each costs one run; cuts are found once for a
graph.
"""

from __future__ import annotations

from collections.abc import Iterator

from memsaving_gradients.planners import least_memory
from memsaving_gradients.planners.bounds.integer import Bound
from memsaving_gradients.planners.chains.frontiers import expensive_storages
from memsaving_gradients.planners.proposal import Limits
from memsaving_gradients.planners.retention.coarsen import Coarse, coarsen
from memsaving_gradients.planners.retention.simulate import Run, run
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["as_the_bound_says", "fitting_cuts"]

#: Sets of cuts that are looked at, of each kind.
CUTS = 12


def as_the_bound_says(coarse: Coarse, bound: Bound) -> Iterator[list[int]]:
    """For each solution that a bound comes from, the decisions that run again what it does."""
    for solved in bound.solved:
        if solved.runs:
            yield coarse.like(solved.runs)


def fitting_cuts(graph: TrainingGraph, limits: Limits, budget: int) -> Iterator[list[int]]:
    """Of each kind of cuts the fastest that fits, the next one that does not, and the lowest."""
    for cuts in graph.derived(_simulated_cuts, frozenset(limits.keep), limits.accumulate):
        fitting = [(r.extra_seconds, k) for k, (_, r) in enumerate(cuts) if r.peak <= budget]
        others = [(r.peak, k) for k, (_, r) in enumerate(cuts) if r.peak > budget]
        lowest = [(r.peak, k) for k, (_, r) in enumerate(cuts)]
        for k in dict.fromkeys(min(c)[1] for c in (fitting, others, lowest) if c):
            yield cuts[k][0]


def _simulated_cuts(
    graph: TrainingGraph, keep: frozenset[int], accumulate: bool
) -> list[list[tuple[list[int], Run]]]:
    """Both kinds of cuts, as decisions and what comes of them."""
    coarse: Coarse = graph.derived(coarsen, keep, accumulate)
    expensive = keep | set(expensive_storages(graph))
    found = []
    for kept in (keep, expensive) if expensive - keep else (keep,):
        sets = graph.derived(least_memory.kept_sets, kept, CUTS)
        decided = [coarse.decisions(kept_set) for kept_set in sets]
        found.append([(decisions, run(coarse.problem, decisions)) for decisions in decided])
    return found
