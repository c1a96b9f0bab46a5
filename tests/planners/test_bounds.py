"""The lower bound on extra time, against exhaustive search."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning.layered import unet_vgg
from memsaving_gradients.planners import Limits, auto
from memsaving_gradients.planners.bounds.integer import bound_within, tightest_bound
from memsaving_gradients.planners.bounds.relaxation import least_extra_seconds
from memsaving_gradients.schedules.order import run_order
from memsaving_gradients.schedules.schedule import plain, recompute_lazily
from memsaving_gradients.schedules.simulate import simulate
from tests.helpers.graphs import GRAPHS, Maker, chain
from tests.helpers.oracle import least_seconds
from tests.helpers.random_graphs import rich, rigid, small
from tests.helpers.sampling import examples
from tests.helpers.schedules import forgetful, halving

#: Sums of times differ in their last bits.
EQUAL = 1 + 1e-9


def check_against_the_optimum(seed: int) -> tuple[int, int, float, float]:
    """Compare bound and optimum of one graph. Return the number of feasible budgets and of tight
    bounds among them, the sum of bounds, and the sum of optima."""
    graph = small(seed)
    met = tight = 0
    bounds = optima = 0.0
    for budget in range(1, simulate(graph, plain(graph)).peak + 2):
        bound = least_extra_seconds(graph, budget)
        optimum = least_seconds(graph, budget, forward_first=False)
        assert bound <= optimum * EQUAL, f"seed {seed}, budget {budget}"
        if optimum < math.inf:
            met += 1
            tight += bound * EQUAL >= optimum
            bounds += bound
            optima += optimum
    return met, tight, bounds, optima


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(150), marks=pytest.mark.slow)], ids=str
)
def test_never_above_the_optimum(seeds):
    found = [check_against_the_optimum(seed) for seed in seeds]
    met, tight, bounds, optima = (sum(column) for column in zip(*found, strict=True))
    print(f"{met} budgets, {tight} tight, bounds {bounds / optima:.3f} of the optima")
    assert tight >= met * TIGHT
    assert bounds >= optima * SHARE


#: The least accepted: the share of budgets whose bound is the optimum, and the sum of bounds as a
#: share of the sum of optima.
TIGHT, SHARE = 0.85, 0.65


@pytest.mark.slow
def test_never_above_the_optimum_of_thousands():
    for seed in range(1000, 4000):
        check_against_the_optimum(seed)


def check_several_moments(seed: int) -> int:
    """Return for how many budgets of one graph the bound solves for several moments together."""
    graph = small(seed)
    many = 0
    for budget in range(1, simulate(graph, plain(graph)).peak + 2):
        found = bound_within(graph, budget)
        optimum = least_seconds(graph, budget, forward_first=False)
        assert found.seconds <= optimum * EQUAL, f"seed {seed}, budget {budget}"
        many += any(len(solved.moments) > 1 for solved in found.solved)
    return many


#: Seeds below 300: those with budgets that need several moments together, and some others.
MANY_MOMENTS = (*range(20), 48, 168, 202, 227, 240, 265)


@pytest.mark.parametrize(
    "seeds", [MANY_MOMENTS, pytest.param(range(300), marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_moments_together_are_never_above_the_optimum(seeds):
    assert sum(map(check_several_moments, seeds)) >= 5


@pytest.mark.slow
def test_moments_together_are_never_above_the_optimum_of_thousands():
    assert sum(map(check_several_moments, range(1000, 4000))) >= 100


def test_moments_together_say_more_than_each():
    instance = unet_vgg()
    graph, budget = instance.graph(), int(0.45 * instance.peak)
    found = bound_within(graph, budget)
    alone = max(solved.seconds for solved in found.solved if len(solved.moments) == 1)
    assert found.seconds > 1.01 * alone
    proposal = auto.plan(graph, Limits(budget=budget))
    assert proposal.peak <= budget
    assert found.seconds <= proposal.extra_seconds <= 1.005 * found.seconds


@given(st.integers(0, 2**32))
@settings(max_examples=examples(150), deadline=None, derandomize=True)
def test_a_larger_budget_has_no_larger_bound(seed):
    graph = small(seed, 12)
    peak = simulate(graph, plain(graph)).peak
    bounds = [least_extra_seconds(graph, budget) for budget in range(1, peak + 2)]
    for smaller, larger in pairwise(bounds):
        assert larger <= smaller * EQUAL
    assert bounds[-1] == bounds[-2] == 0


@given(rich(sums=True), st.integers(0, 2**32), st.booleans(), st.booleans())
@settings(max_examples=examples(300), deadline=None, derandomize=True)
def test_no_schedule_beats_the_bound(graph, seed, accumulate, lazily):
    """Use any schedule's own peak as the budget, for graphs with views, several outputs, writes in
    place, sums, and scratch space."""
    chained = graph.sums if accumulate else ()
    if lazily:
        kept = {s for k, s in enumerate(graph.residuals) if seed >> k & 1}
        schedule = recompute_lazily(graph, kept, chained)
    else:
        schedule = forgetful(graph, seed, chained=accumulate)
    originals = [step.op for step in schedule.steps if not step.copy]
    if originals != run_order(graph):
        return
    simulation = simulate(graph, schedule)
    bound = least_extra_seconds(graph, simulation.peak, accumulate=accumulate)
    assert bound <= simulation.extra_seconds * EQUAL
    tightest = tightest_bound(graph, simulation.peak, accumulate=accumulate)
    assert bound <= tightest <= simulation.extra_seconds * EQUAL


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_known_graphs(name):
    graph = rigid(GRAPHS[name]())
    peak = simulate(graph, plain(graph)).peak
    assert least_extra_seconds(graph, peak) == 0
    assert least_extra_seconds(graph, 0) == math.inf
    bounds = [least_extra_seconds(graph, budget) for budget in range(0, peak + 1, peak // 20 + 1)]
    assert bounds == sorted(bounds, reverse=True)
    for seed in range(4):
        simulation = simulate(graph, forgetful(graph, seed))
        assert least_extra_seconds(graph, simulation.peak) <= simulation.extra_seconds * EQUAL


def test_a_chain_that_is_halved_takes_no_less():
    graph = chain([1] * 64, residual="output")
    simulation = simulate(graph, halving(graph))
    bound = least_extra_seconds(graph, simulation.peak)
    # Each value that is not alive when backward begins is recomputed at least once.
    assert 50 <= bound <= simulation.extra_seconds


def test_results_of_one_op_come_back_together():
    maker = Maker()
    whole = maker.op(maker.source(), size=16)
    parts = maker.op(whole, size=(4, 4, 4, 4), residual="none")
    joined = maker.op(*(maker.op(parts + k) for k in range(4)), residual="none")
    maker.op(maker.op(joined, size=50, residual="none"), residual="none")
    # The parts have no room next to 50 bytes and one; one op recomputes all of them.
    assert least_extra_seconds(maker.graph(), 51) == 1.0


@pytest.mark.parametrize("bound", [least_extra_seconds, tightest_bound])
def test_what_several_results_are_made_of_may_be_kept_instead(bound):
    maker = Maker()
    root = maker.op(maker.source(), size=4, expensive=True)
    pair = maker.op(root, size=(4, 4), residual="none")
    joined = maker.op(maker.op(pair), maker.op(pair + 1), residual="none")
    maker.op(maker.op(joined, size=20, residual="none"), residual="none")
    graph = rigid(maker.graph())
    for budget in range(25, 32):
        assert bound(graph, budget) <= least_seconds(graph, budget) * EQUAL


def test_what_is_wanted_has_a_reader_more():
    maker = Maker()
    whole = maker.op(maker.source(), size=8)
    part = maker.op(whole, size=8)
    maker.op(maker.op(part, size=20, residual="none"), residual="none")
    graph = maker.graph()
    wanted = dataclasses.replace(graph, targets=(*graph.targets, whole))
    assert least_extra_seconds(wanted, 22) <= least_extra_seconds(graph, 22)
    simulation = simulate(wanted, recompute_lazily(wanted, {whole}))
    bound = least_extra_seconds(wanted, simulation.peak)
    assert bound <= simulation.extra_seconds * EQUAL


@pytest.mark.parametrize("bound", [least_extra_seconds, tightest_bound])
def test_scratch_space_leaves_less_room(bound):
    graph = chain([1] * 8, residual="output")
    budget = simulate(graph, plain(graph)).peak
    scratch = np.zeros(graph.length, np.int64)
    scratch[graph.first_backward + 1] = 3
    # Three of the values that are alive at the second backward op have no room.
    assert bound(graph, budget) == 0
    assert bound(dataclasses.replace(graph, workspace=scratch), budget) == 3
