"""Plans for many budgets at once: each is valid and within its budget, none is slower than the plan
of a smaller budget, all are about as good as plans made one by one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings

from memsaving_gradients.planners import Interrupted, Limits, auto, budget_curve
from memsaving_gradients.planners.bounds.relaxation import least_extra_seconds
from memsaving_gradients.schedules.schedule import plain
from memsaving_gradients.schedules.simulate import simulate
from tests.helpers.checker import check_schedule
from tests.helpers.graphs import GRAPHS
from tests.helpers.oracle import least_seconds
from tests.helpers.random_graphs import rich, small
from tests.helpers.sampling import examples

NEAR = 1e-9


def plans(graph, budgets):
    """Return the plans by budget, checked for the properties of every curve."""
    found = budget_curve.plans(graph, Limits(), budgets)
    before = -math.inf
    for budget, proposal in found:
        checked = check_schedule(graph, proposal.schedule)
        assert proposal.peak <= budget
        assert proposal.peak <= checked.peak or proposal.schedule.chained
        assert proposal.extra_seconds >= before
        assert least_extra_seconds(graph, budget) <= proposal.extra_seconds + NEAR
        before = proposal.extra_seconds
    assert [budget for budget, _ in found] == sorted({b for b, _ in found}, reverse=True)
    return dict(found)


@settings(max_examples=examples(30), deadline=None)
@given(rich(most=10, sums=True))
def test_every_plan_is_valid_and_no_budget_is_slower_than_a_smaller_one(graph):
    peak = simulate(graph, plain(graph)).peak
    found = plans(graph, [peak, 3 * peak // 4, peak // 2, peak // 4])
    assert found[peak].extra_seconds == 0


@pytest.mark.parametrize("name", ["chain", "unequal chain", "residual chain", "u"])
def test_as_good_as_plans_for_one_budget(name):
    graph = GRAPHS[name]()
    peak = simulate(graph, plain(graph)).peak
    found = plans(graph, [int(share * peak) for share in (0.9, 0.8, 0.6, 0.5)])
    for budget, proposal in found.items():
        alone = auto.plan(graph, Limits(budget=budget))
        assert proposal.extra_seconds <= 1.25 * alone.extra_seconds + 0.01 * graph.total_seconds


def test_an_interrupted_curve_gives_the_plans_so_far():
    graph = GRAPHS["residual chain"]()
    peak = simulate(graph, plain(graph)).peak
    shares = []

    def progress(share, what):
        shares.append(share)
        if share > 0.3:
            raise Interrupted

    budgets = [int(share * peak) for share in (1, 0.9, 0.8, 0.7, 0.6)]
    found = dict(budget_curve.plans(graph, Limits(progress=progress), budgets))
    assert shares == sorted(shares) and len(shares) < len(budgets)
    assert found[peak].extra_seconds == 0 and len(found) > 1


def test_close_to_the_optimum_on_small_graphs():
    mine = best = 0.0
    for seed in range(60):
        graph = small(seed)
        peak = simulate(graph, plain(graph)).peak
        for budget, proposal in plans(graph, range(peak // 2, peak)).items():
            optimum = least_seconds(graph, budget)
            assert proposal.extra_seconds >= optimum - NEAR
            mine, best = mine + proposal.extra_seconds, best + optimum
    assert best > 0
    assert mine <= 1.15 * best
