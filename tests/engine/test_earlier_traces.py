"""A step that is traced again begins with the plan that kept its budget before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.budget import safe_bytes
from memsaving_gradients.engine.planning import earlier_traces, within_limits
from tests.helpers.support import exact_arithmetic, numbers

WIDTH, LAYERS, BATCH = 32, 16, 1024


class Step:
    """A step of a chain of layers, to be traced within budgets."""

    def __init__(self, layers: int = LAYERS, activation: Callable[[Any], Any] = tf.tanh) -> None:
        self.weights = [tf.Variable(numbers(f"w{k}", WIDTH, WIDTH)) for k in range(layers)]
        self.activation = activation

    def loss(self, x: tf.Tensor) -> tf.Tensor:
        for weight in self.weights:
            x = self.activation(x @ weight)
        return tf.reduce_mean(x**2)

    def traced(self, batch: int | None, budget: int | float | None, **options: Any) -> Any:
        """Return the concrete function for a batch size."""

        def step(x: tf.Tensor) -> list[tf.Tensor]:
            loss = self.loss(x)
            if budget is None:
                grads = tf.gradients(loss, self.weights)
            else:
                grads = ms.gradients(loss, self.weights, budget=budget, **options)
            return [tf.reduce_sum(grad**2) for grad in grads]

        return tf.function(step).get_concrete_function(tf.TensorSpec([batch, WIDTH]))

    def planned(self, batch: int, budget: int | float, **options: Any) -> ms.Plan:
        (plan,) = ms.plans(self.traced(batch, budget, **options).graph)
        return plan


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The searches that began without a plan of an earlier trace, one number for each."""
    begun: list[int] = []
    seek = within_limits.seek

    def counted(site: Any) -> Any:
        begun.append(len(begun))
        return seek(site)

    monkeypatch.setattr(within_limits, "seek", counted)
    return begun


def need(plan: ms.Plan) -> int:
    assert plan.simulation is not None
    return safe_bytes(plan.simulation, plan.gating)


@pytest.mark.parametrize("batch", [BATCH // 2, BATCH * 3 // 4, BATCH, 2 * BATCH])
def test_another_batch_size_begins_with_the_first_plan(batch, searches):
    step = Step()
    first = step.planned(BATCH, 0.6)
    assert len(searches) == 1
    assert first.clones
    second = step.planned(batch, 0.6)
    assert len(searches) == 1, "planned anew"
    assert need(second) <= second.budget
    assert second.clones
    assert second.extra_time <= first.extra_time + 0.01
    assert 0 <= second.lower_bound <= second.extra_time


def test_its_gradients_are_plain_ones():
    step = Step()
    step.planned(BATCH, 0.6)
    x = numbers("x", BATCH // 2, WIDTH)
    with exact_arithmetic():
        found = step.traced(BATCH // 2, 0.6)(tf.constant(x))
        plain = step.traced(BATCH // 2, None)(tf.constant(x))
    for one, other in zip(found, plain, strict=True):
        np.testing.assert_array_equal(one, other)


def test_another_step_or_another_request_is_planned_anew(searches):
    step = Step()
    step.planned(BATCH, 0.6)
    step.planned(BATCH, 0.7)
    assert len(searches) == 2
    step.planned(BATCH, 0.6, hold_gradients=True)
    assert len(searches) == 3
    Step(layers=LAYERS + 1).planned(BATCH, 0.6)
    assert len(searches) == 4
    # As many ops, and another one of them.
    Step(activation=tf.sin).planned(BATCH, 0.6)
    assert len(searches) == 5
    step.planned(BATCH, 0.6)
    assert len(searches) == 5


def test_bytes_that_suffice_for_a_smaller_batch_need_no_plan():
    step = Step()
    budget = step.planned(BATCH, 0.6).budget
    step.planned(BATCH, budget)
    with pytest.warns(ms.errors.PlanNote, match="meets the budget"):
        second = step.planned(BATCH // 2, budget)
    assert not second.clones
    assert second.extra_time == 0


def test_a_plan_that_leaves_much_of_the_budget_is_not_used_again(searches):
    step = Step()
    budget = step.planned(BATCH, 0.4).budget
    first = step.planned(BATCH, budget)
    assert len(searches) == 2
    second = step.planned(BATCH * 5 // 8, budget)
    assert len(searches) == 3
    assert need(second) <= budget
    assert second.extra_time < first.extra_time


def test_a_plan_that_breaks_the_budget_is_not_used_again(searches):
    step = Step()
    budget = step.planned(BATCH, 0.7).budget
    step.planned(BATCH, budget)
    second = step.planned(BATCH * 5 // 4, budget)
    assert need(second) <= budget


def test_later_traces_do_not_replace_the_first_plan():
    step = Step()
    first = step.planned(BATCH, 0.6)
    step.planned(BATCH // 2, 0.6)
    assert step.planned(BATCH, 0.6).extra_time == first.extra_time


def test_plans_that_were_cut_short_are_planned_anew(searches):
    step = Step()
    for _ in range(2):
        with pytest.warns(ms.errors.PlanningStoppedWarning):
            step.planned(BATCH, 0.6, planning_seconds=1e-9)
    assert len(searches) == 2


def test_few_plans_are_remembered_and_no_graph(searches, monkeypatch):
    monkeypatch.setattr(earlier_traces, "MOST_PLANS", 2)
    step = Step(layers=8)
    graph = weakref.ref(step.traced(BATCH, 0.6).graph)
    gc.collect()
    assert graph() is None
    for share in (0.7, 0.8):
        step.planned(BATCH, share)
    before = len(searches)
    step.planned(BATCH, 0.6)
    assert len(searches) == before + 1


def test_an_unknown_batch_is_refused_after_a_known_one():
    step = Step(layers=8)
    budget = step.planned(BATCH, 0.8).budget
    step.planned(BATCH, budget)
    with pytest.raises(ms.errors.ArgumentError, match="needs the batch size"):
        step.traced(None, budget)


def test_plans_that_store_residuals_are_made_anew(searches):
    step = Step()
    for batch in (BATCH, 4 * BATCH):
        plan = step.planned(batch, 0.6, encode="float16")
        assert all(how.bytes <= batch * WIDTH * 2 for how in plan.schedule.stored.values())
    assert len(searches) == (2 if plan.schedule.stored else 1)


def test_equal_ops_of_other_costs_are_planned_anew(searches):
    def step(sizes: list[int]) -> Callable[..., Any]:
        kernels = [tf.Variable(numbers(f"k{k}", size, size, 8, 1)) for k, size in enumerate(sizes)]

        def run(x: tf.Tensor) -> list[tf.Tensor]:
            for kernel in kernels:
                x = tf.tanh(tf.nn.depthwise_conv2d(x, kernel, [1, 1, 1, 1], "SAME"))
            grads = ms.gradients(tf.reduce_mean(x**2), kernels, budget=0.6)
            return [tf.reduce_sum(grad**2) for grad in grads]

        return run

    def extra_time(sizes: list[int]) -> float:
        spec = tf.TensorSpec([4, 32, 32, 8])
        return ms.plans(tf.function(step(sizes)).get_concrete_function(spec).graph)[-1].extra_time

    one, other = [1, 1, 9, 9] * 3, [9, 9, 1, 1] * 3
    fresh = extra_time(one)
    earlier_traces.forget()
    extra_time(other)
    assert extra_time(one) <= fresh + 0.02
    assert len(searches) == 3
