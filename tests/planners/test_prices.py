"""Prices of memory: the cut against all decisions, rounding, and plans against budgets."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from memsaving_gradients.planners.prices import iteration
from memsaving_gradients.planners.prices.closure import Closure
from memsaving_gradients.planners.prices.gaps import Gaps, Times
from memsaving_gradients.planners.prices.iteration import GENTLE, Pace, Pricing
from memsaving_gradients.planners.prices.rounding import fill, profile, repair
from memsaving_gradients.planners.retention.coarsen import coarsen
from memsaving_gradients.planners.retention.problem import DROPPED, KEPT, Problem
from memsaving_gradients.planners.retention.simulate import run
from memsaving_gradients.schedules.training_graph import TrainingGraph
from tests.helpers.graphs import chain, residual_chain
from tests.helpers.random_graphs import rich
from tests.helpers.sampling import examples

#: The cut's capacities are integers: costs that they cannot tell apart count as equal.
NEAR = 1e-6


def problem_of(graph) -> Problem:
    """Return the retention problem of a graph."""
    return coarsen(graph).problem


def cost_of(gaps: Gaps, prices: np.ndarray, times: Times, decisions: list[int]) -> float:
    """Return what decisions cost at these prices and times; infinite: a value is missing."""

    def held(gap: int, begin: int, end: int) -> float:
        return float(gaps.size[gap] * prices[begin + 1 : min(end, len(prices))].sum())

    there = {gap for gap in gaps.tails.tolist() if decisions[gap] == KEPT}
    cost = sum(held(gap, gaps.begin[gap], times.until[gap]) for gap in there)
    todo = []
    for gap in gaps.inner.tolist():
        if decisions[gap] == KEPT:
            cost += held(gap, gaps.begin[gap], gaps.end[gap])
        else:
            cost += gaps.seconds[gap] + held(gap, times.made[gap], gaps.end[gap])
            todo.append(gap)
    tails = set(gaps.tails.tolist())
    while todo:
        for needed in gaps.inputs[todo.pop()]:
            if needed in tails and needed not in there:
                there.add(needed)
                todo.append(needed)
                made, until = times.made[needed], times.until[needed]
                cost += gaps.seconds[needed] + held(needed, made, until)
    return float(cost)


#: Recomputing the inputs of two values costs more than dropping both saves: the sources of the cut
#: give less than the capacity of one of its edges.
DEAR_TAIL = TrainingGraph.of(
    [(), (0,), (1,), (1,), (1,), (1,), (2,), (), (), (8, 2), (7, 9), (10, 2)],
    7,
    size=[0, 4000, 4000, 1, 1, 1, 1, 4000, 1, 4000, 4000, 4000],
    seconds=[0.0, *[1.0] * 11],
    clonable=[False, *[True] * 6, *[False] * 5],
)


@example(DEAR_TAIL, 0)
@given(rich(most=7), st.integers(0, 10_000))
@settings(max_examples=examples(60), deadline=None, derandomize=True)
def test_the_cut_is_the_cheapest(graph, seed):
    problem = problem_of(graph)
    gaps = Gaps(problem)
    decided = [*gaps.inner.tolist(), *gaps.tails.tolist()]
    assume(0 < len(decided) <= 10)
    draw = np.random.default_rng(seed)
    prices = draw.random(gaps.events) * draw.choice([0.0, 1e-6, 1e-3, 1.0])
    plain = problem.plain()
    times = gaps.times(run(problem, plain), plain)
    found = Closure(gaps).decide(prices, times, plain, linear=False)
    least = math.inf
    for choice in itertools.product((KEPT, DROPPED), repeat=len(decided)):
        trial = plain.copy()
        for gap, what in zip(decided, choice, strict=True):
            trial[gap] = what
        least = min(least, cost_of(gaps, prices, times, trial))
    unit = sum(problem.seconds) + 1e-12
    assert cost_of(gaps, prices, times, found) <= least + NEAR * (unit + least)


@given(rich(most=12))
@settings(max_examples=examples(40), deadline=None, derandomize=True)
def test_without_prices_everything_is_kept(graph):
    problem = problem_of(graph)
    gaps = Gaps(problem)
    plain = problem.plain()
    times = gaps.times(run(problem, plain), plain)
    found = Closure(gaps).decide(np.zeros(gaps.events), times, plain)
    assert run(problem, found).again == []


@given(rich(most=12), st.floats(0.3, 1.0), st.sampled_from([Pace(), *GENTLE]))
@settings(max_examples=examples(40), deadline=None, derandomize=True)
def test_plans_are_what_simulation_says(graph, share, pace):
    problem = problem_of(graph)
    pricing = Pricing(problem)
    budget = int(share * pricing.plain_run.peak)
    found = pricing.plan(budget, pace)
    again = run(problem, found.decisions)
    assert (again.peak, again.extra_seconds) == (found.run.peak, found.run.extra_seconds)
    assert all(problem.respects(gap, what) for gap, what in enumerate(found.decisions))


@given(rich(most=12), st.floats(0.3, 1.0))
@settings(max_examples=examples(40), deadline=None, derandomize=True)
def test_rounding_never_makes_a_plan_worse(graph, share):
    problem = problem_of(graph)
    gaps = Gaps(problem)
    decisions = [
        DROPPED if is_open else what
        for is_open, what in zip(gaps.open.tolist(), problem.plain(), strict=True)
    ]
    before = run(problem, decisions)
    budget = max(int(share * before.peak), 1)

    def simulate(trial):
        return run(problem, trial)

    repaired, after = repair(gaps, simulate, problem.plain(), simulate(problem.plain()), budget, 50)
    assert after.excess(budget) <= simulate(problem.plain()).excess(budget)
    if after.peak <= budget:
        _, full = fill(gaps, simulate, repaired, after, budget)
        assert full.peak <= budget and full.extra_seconds <= after.extra_seconds


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
@pytest.mark.parametrize("make", [lambda n: chain([1] * n), residual_chain])
def test_budgets_of_chains_are_met(make, share):
    problem = problem_of(make(40))
    pricing = Pricing(problem)
    budget = int(share * pricing.plain_run.peak)
    found = pricing.plan(budget)
    assert found.run.peak <= budget
    assert profile(pricing.gaps, found.run).max() == found.run.peak


def test_enough_room_recomputes_nothing():
    pricing = Pricing(problem_of(chain([1] * 10)))
    found = pricing.plan(pricing.plain_run.peak)
    assert found.run.extra_seconds == 0 and pricing.runs == 0


@pytest.mark.parametrize("limited", [True, False])
def test_local_searches_of_an_iteration_are_limited(monkeypatch, limited):
    searched: list[int] = []
    descend = iteration.Search.descend

    def counted(self, *args, **kwargs):
        before = self.runs
        try:
            return descend(self, *args, **kwargs)
        finally:
            searched.append(self.runs - before)

    monkeypatch.setattr(iteration.Search, "descend", counted)
    monkeypatch.setattr(iteration, "RUNS_OF_A_STRETCH", 5)
    if not limited:
        monkeypatch.setattr(iteration, "SEARCHES", 1000)
    pricing = Pricing(problem_of(chain([1] * 100)))
    pricing.plan(int(0.2 * pricing.plain_run.peak))
    # The last search that begins may end above the limit.
    assert (sum(searched[:-1]) < 4 * 5) is limited
