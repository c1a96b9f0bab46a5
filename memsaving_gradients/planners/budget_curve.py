"""Plans for many budgets at once, from the largest to the smallest, each begun where the last one
ended.

The prices of a budget are nearly those of the next smaller one. So
:mod:`~memsaving_gradients.planners.prices.iteration` goes on from the last prices, in a third of
its steps. In addition come the plans of :mod:`~memsaving_gradients.planners.chains.chain`, whose
table answers for all budgets, and which are good at small ones. Each budget gets the fastest plan
that is known and fits, so that none is slower than that for a smaller budget.

Plans are as good as those that are asked for one by one to within a point or so of a step's time,
and worse at small budgets, where a search pays. Deterministic; less than a tenth of a second a
budget for 10,000 ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from memsaving_gradients.planners.bounds.integer import bound_within
from memsaving_gradients.planners.chains import chain
from memsaving_gradients.planners.prices.iteration import Priced, Pricing
from memsaving_gradients.planners.proposal import Interrupted, Limits, Proposal, proposed, untouched
from memsaving_gradients.planners.retention.coarsen import Coarse, coarsen
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["plans"]


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
        bound_within(graph, budget, accumulate=limits.accumulate, deep=False) for budget in wanted
    ]
    known = [untouched(graph, limits)]
    with suppress(Interrupted):
        known += (
            proposed(graph, limits, schedule)
            for schedule in chain.candidates(graph, limits, wanted)
        )
        known += _priced(graph, limits, wanted)
    found = []
    for budget, bound in zip(wanted, bounds, strict=True):
        fits = [proposal for proposal in known if proposal.peak <= budget]
        if fits:
            best = min(fits, key=lambda p: (p.extra_seconds, p.peak))
            found.append((budget, replace(best, lower_bound=bound.seconds)))
    return found


def _priced(graph: TrainingGraph, limits: Limits, budgets: Sequence[int]) -> Iterator[Proposal]:
    """For each budget, from the largest to the smallest, what prices find."""
    coarse: Coarse = graph.derived(coarsen, frozenset(limits.keep), limits.accumulate)
    pricing = Pricing(coarse.problem)
    start: Priced | None = None
    off = 0
    for number, budget in enumerate(budgets):
        if limits.progress is not None:
            limits.progress(number / len(budgets), "planning for many budgets")
        # The problem counts bytes a little differently from the graph: by about as much as at the
        # last budget.
        wanted = max(1, budget - off)
        start = pricing.plan(wanted, start=start)
        proposal = proposed(graph, limits, coarse.schedule(start.decisions))
        if start.run.peak <= wanted:
            off = proposal.peak - start.run.peak
        yield proposal
