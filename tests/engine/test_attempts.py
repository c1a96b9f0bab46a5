"""A plan keeps its budget in each of the simulated steps, or the search looks for another plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.memory.bfc_allocator import peaks_in_turn
from graph_tools.memory.timeline import Timeline
from memsaving_gradients.budget import chunk_bytes, plain_bytes, safe_bytes
from memsaving_gradients.engine.driver import attempts
from memsaving_gradients.engine.planning import earlier_traces, outcome, within_limits

LAYERS = 24
#: The search with the default planner takes so long that it is in the slow suite.
planners = pytest.mark.parametrize(
    "planner", ["chain", pytest.param("auto", marks=pytest.mark.slow)]
)


def planned(budget: float, **options: Any) -> ms.Plan:
    earlier_traces.forget()
    with tf.Graph().as_default() as graph:
        x = y = tf.compat.v1.placeholder(tf.float32, [256, 128])
        for _ in range(LAYERS):
            y = tf.tanh(tf.matmul(y, tf.compat.v1.placeholder(tf.float32, [128, 128])))
        ms.gradients(y, x, budget=budget, **options)
        (plan,) = ms.plans(graph)
    return plan


def unlucky(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Let the worst step take ``factor`` times an average step's bytes and margin."""

    def worst(simulation: Timeline) -> int:
        return int(simulation.allocated_peak * (1 + simulation.margin) * factor)

    monkeypatch.setattr(Timeline, "allocated_worst", property(worst))


def need(plan: ms.Plan) -> int:
    assert plan.simulation is not None
    return safe_bytes(plan.simulation, plan.gating)


@planners
def test_the_worst_step_keeps_the_budget(planner, monkeypatch):
    unlucky(monkeypatch, 1.0)
    first = planned(0.5, planner=planner)
    assert need(first) <= first.budget
    unlucky(monkeypatch, 1.1)
    assert need(first) > first.budget
    second = planned(0.5, planner=planner)
    assert need(second) <= second.budget == first.budget


@planners
def test_the_worst_step_keeps_the_least_budget_that_an_error_names(planner, monkeypatch):
    unlucky(monkeypatch, 1.5)
    with pytest.raises(ms.errors.BudgetError) as refused:
        planned(0.01, planner=planner)
    assert need(planned(refused.value.least, planner=planner)) <= refused.value.least


def test_the_first_plan_leaves_room_for_what_the_executor_adds_to_plain_training(monkeypatch):
    first = []
    within = attempts.Search.within

    def noted(search, most):
        first.append(most)
        return within(search, most)

    monkeypatch.setattr(attempts.Search, "within", noted)
    budget = planned(0.6, planner="chain").budget
    monkeypatch.setattr(within_limits, "safe_bytes", lambda *of: 2 * safe_bytes(*of))
    planned(0.6, planner="chain")
    as_it_is, doubled = first
    assert 0 < doubled < as_it_is < budget
    assert doubled == pytest.approx(as_it_is / 2, rel=0.1)


def test_between_a_plan_that_broke_the_budget_and_one_that_leaves_much_of_it_there_may_be_a_faster(
    monkeypatch,
):
    # The first plan runs with twice its simulated bytes, later plans with just these. So the second
    # plan is made for less than half the budget.
    runs, most = [], []
    follow = attempts.follow

    def unlike_the_others(site, given):
        found = follow(site, given)
        runs.append(found)
        return found

    def twice(simulation, gating):
        return safe_bytes(simulation, gating) * (2 if simulation is runs[0].simulation else 1)

    at = attempts.Search.at

    def noted(search, asked, quick):
        most.append(asked)
        return at(search, asked, quick=quick)

    monkeypatch.setattr(attempts, "follow", unlike_the_others)
    monkeypatch.setattr(outcome, "safe_bytes", twice)
    monkeypatch.setattr(attempts.Search, "at", noted)
    plan = planned(0.6, planner="chain")
    assert need(plan) <= plan.budget
    first = runs[0].outcome.proposal.peak
    # A plan of this size would just fit if later plans took twice their bytes as well.
    just = first * plan.budget / (2 * safe_bytes(runs[0].simulation, plan.gating))
    assert most[0] < just < most[1] < first
    kept = [run.outcome.plan for run in runs[1:] if need(run.outcome.plan) <= plan.budget]
    assert plan.extra_time == min(each.extra_time for each in kept) < kept[0].extra_time


def test_the_worst_step_is_of_all_arenas():
    """Buffers that fit exactly into one arena meet a hole that is too small, or too large, in
    another."""
    born, dies = np.array([0, 1, 2]), np.array([1, 2, 3])
    size = np.array([3 << 20, 2 << 20, 3 << 20])
    before = [5 << 19, 3 << 20, 7 << 18, 6 << 20]
    one = peaks_in_turn([(born, dies, size)], before=before, steps=4)
    all_three = peaks_in_turn([(born, dies, size)], before=before, steps=4, arenas=3)
    assert one.average == one.worst
    assert all_three.worst >= one.worst
    assert all_three.worst > all_three.average >= 5 << 20


@planners
def test_a_step_needs_at_least_what_it_does_on_average(planner):
    simulation = planned(0.5, planner=planner).simulation
    assert simulation is not None
    assert safe_bytes(simulation, "control") > chunk_bytes(simulation, "control")
    assert safe_bytes(simulation, "control") >= simulation.allocated_worst
    assert safe_bytes(simulation, "data") > chunk_bytes(simulation, "data") == simulation.peak


def test_fractions_are_of_no_more_than_plain_training_takes():
    # In an arena of its own, each buffer would get a chunk larger than itself. Here the buffers fit
    # into holes that variables have left.
    born = np.arange(3)
    buffers = born, born + 1, np.array([1_900_000, 1_450_000, 1_250_000])
    step = Timeline(np.zeros(3, np.int64), 0, buffers, persistent=(1_700_000, 2_800_000))
    assert step.allocated_least > step.allocated_peak
    assert plain_bytes(step, "control") == step.allocated_peak <= safe_bytes(step, "control")


def test_plain_gradients_within_a_budget_are_described_as_they_run():
    # In the order of creation, all wide tensors would be alive at once.
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2**16])
        wide = [tf.repeat(x * (k + 1.0), 8) for k in range(16)]
        total = tf.add_n([tf.reduce_sum(w) for w in wide])
        with pytest.warns(ms.errors.PlanNote):
            ms.gradients(total, x, budget=1.0)
    (plan,) = ms.plans(graph)
    assert plan.clones == 0
    assert plan.allocated <= plan.budget
