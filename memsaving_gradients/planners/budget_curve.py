"""Plans for many budgets at once, from the largest to the smallest, each begun where the last one
ended.

A plan for a budget is most of a plan for the next smaller one. So the search of
:mod:`~memsaving_gradients.planners.auto` comes down to all of them in little more time than to one:
from the decisions for the last budget, and from some of
:mod:`~memsaving_gradients.planners.retention.starts`, it descends to the next, and improves what it
came to for a while. Beside that stand the plans of
:mod:`~memsaving_gradients.planners.chains.chain`, whose table answers for all budgets; in deep
networks, where a search would take long, they stand alone. Each budget gets the fastest plan that
is known and fits, so that none is slower than that for a smaller budget.

Plans are as good as those that are asked for one by one to within a point or so of a step's time,
and worse at small budgets, where more starts and longer searches pay. Deterministic; some times
`STEPS` steps simulated for each budget.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from memsaving_gradients.planners.auto import DEEP
from memsaving_gradients.planners.bounds.integer import SHALLOW, Bound, bound_within
from memsaving_gradients.planners.chains import chain
from memsaving_gradients.planners.proposal import Interrupted, Limits, Proposal, proposed, untouched
from memsaving_gradients.planners.retention.coarsen import Coarse, coarsen
from memsaving_gradients.planners.retention.local_search import Search
from memsaving_gradients.planners.retention.simulate import Run
from memsaving_gradients.planners.retention.starts import as_the_bound_says, fitting_cuts
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["plans"]

#: Steps that are simulated for each budget, in so many runs: this share of them to come down
#: to it, the rest to improve.
STEPS, FEWEST_RUNS, MOST_RUNS, DESCENT = 120_000, 30, 600, 0.5
#: It begins at so many places, and at others where the best of these takes more than so many times
#: the least extra time.
FEW_STARTS, GOOD = 2, 1.2
#: How boldly the descent goes where a budget is far below the last one.
BOLD = 8


def plans(
    graph: TrainingGraph, limits: Limits, budgets: Sequence[int]
) -> list[tuple[int, Proposal]]:
    """For each of ``budgets`` that a plan was found for, from the largest to the smallest, the
    fastest one, with its lower bound.

    ``limits.budget`` and ``limits.seconds`` are not looked at. Whoever interrupts it gets the plans
    so far.

    Examples
    --------
    A chain of three values of a byte each, which the backward pass reads last one first:

    >>> steps = TrainingGraph.of([(), (0,), (1,), (2,), (3, 2), (4, 1), (5, 0)], 4)
    >>> [(budget, plan.extra_seconds) for budget, plan in plans(steps, Limits(), [5, 4, 2])]
    [(5, 0.0), (4, 1.0)]
    """
    wanted = sorted(set(budgets), reverse=True)
    bounds = [
        bound_within(graph, budget, accumulate=limits.accumulate, depth=SHALLOW)
        for budget in wanted
    ]
    known = [untouched(graph, limits)]
    with suppress(Interrupted):
        known += (
            proposed(graph, limits, schedule)
            for schedule in chain.candidates(graph, limits, wanted)
        )
        if graph.length <= DEEP:
            known += _descended(graph, limits, dict(zip(wanted, bounds, strict=True)))
    found = []
    for budget, bound in zip(wanted, bounds, strict=True):
        fits = [proposal for proposal in known if proposal.peak <= budget]
        if fits:
            best = min(fits, key=lambda p: (p.extra_seconds, p.peak))
            found.append((budget, replace(best, lower_bound=bound.seconds)))
    return found


def _descended(
    graph: TrainingGraph, limits: Limits, bounds: Mapping[int, Bound]
) -> Iterator[Proposal]:
    """For each budget, from the largest to the smallest, the best that the search comes to."""
    coarse: Coarse = graph.derived(coarsen, frozenset(limits.keep), limits.accumulate)
    problem = coarse.problem
    runs = STEPS // max(1, len(problem.reads))
    runs = min(max(runs, FEWEST_RUNS), MOST_RUNS)
    decisions = problem.plain()
    off = 0
    for number, (budget, bound) in enumerate(bounds.items()):
        if limits.progress is not None:
            limits.progress(number / len(bounds), "planning for many budgets")
        if bound.seconds == float("inf"):
            return
        # The problem counts bytes a little differently from the graph: by about as much as at the
        # last budget.
        search = Search(problem, max(1, budget - off))
        drops = as_the_bound_says(coarse, bound)
        cuts = fitting_cuts(graph, limits, search.budget)
        starts = itertools.chain([decisions], drops, cuts)
        trial, result = _down(search, starts, int(runs * DESCENT), GOOD * bound.seconds)
        if result.peak > search.budget:
            continue
        decisions, result = search.improve(trial, result, int(runs * (1 - DESCENT)))
        proposal = proposed(graph, limits, coarse.schedule(decisions))
        off = proposal.peak - result.peak
        yield proposal


def _down(
    search: Search, starts: Iterable[list[int]], most: int, enough: float
) -> tuple[list[int], Run]:
    """The best that is come to from several places; from a few of them, if that takes no more than
    ``enough`` seconds."""
    found: list[tuple[list[int], Run]] = []
    for start in starts:
        trial, _ = search.descend(start, most, bold=BOLD)
        trial, result = search.descend(trial, most)
        found.append(search.keep_again(trial, result, range(len(trial))))
        found.sort(key=lambda one: one[1].worth(search.budget))
        if len(found) >= FEW_STARTS and found[0][1].worth(search.budget) <= (0.0, enough):
            break
    return found[0]
