"""Several calls for gradients in one step. In a function, they keep the budget together. In a
graph, which has no known end, each call keeps it alone, and a warning says what they exceed
together."""

from __future__ import annotations

import re
import warnings

import pytest
import tensorflow as tf

import memsaving_gradients as ms
from tests.helpers.fresh import fresh

BudgetWarning = ms.errors.BudgetWarning
v1 = tf.compat.v1
LAYERS, UNIT = 20, 4 * 2**14


def tower(x: tf.Tensor) -> tf.Tensor:
    for _ in range(LAYERS):
        x = tf.tanh(x)
    return tf.reduce_sum(x)


def both(budget: int, *, second: int | None = None, **options) -> list[tf.Tensor]:
    """Return the gradients of two towers that have nothing in common."""
    xs = [v1.placeholder(tf.float32, [2**14]) for _ in range(2)]
    ys = [tower(x) for x in xs]
    budgets = budget, budget if second is None else second
    found = []
    for x, y, most in zip(xs, ys, budgets, strict=True):
        found += ms.gradients(y, x, budget=most, planner="chain", **options)
    return found


def test_what_is_too_much_together_is_said() -> None:
    with tf.Graph().as_default(), pytest.warns(BudgetWarning, match="by itself") as said:
        both(10 * UNIT)
    (warning,) = [w for w in said if w.category is BudgetWarning]
    need = int(re.findall(r"take ([\d,]+)", str(warning.message))[0].replace(",", ""))
    assert 10 * UNIT < need <= 20 * UNIT


def test_what_is_kept_together_is_not_worth_a_word() -> None:
    with tf.Graph().as_default(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ms.errors.PlanNote)
        warnings.simplefilter("error", BudgetWarning)
        both(10 * UNIT, second=45 * UNIT)


def test_a_plain_second_call_counts() -> None:
    with tf.Graph().as_default(), pytest.warns((BudgetWarning, ms.errors.PlanNote)) as said:
        both(10 * UNIT, second=24 * UNIT)
    assert {w.category for w in said} == {BudgetWarning, ms.errors.PlanNote}


def test_gradients_of_gradients_are_one_step() -> None:
    with tf.Graph().as_default(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ms.errors.PlanNote)
        warnings.simplefilter("error", BudgetWarning)
        x = v1.placeholder(tf.float32, [2**14])
        (first,) = ms.gradients(tower(x), x, budget=12 * UNIT, planner="chain")
        second = ms.gradients(tf.reduce_sum(first**2), x, budget=60 * UNIT, planner="chain")
    assert second


def peaks_together() -> tuple[int, int, int]:
    from graph_tools.memory.measure import measure_peak

    @tf.function(autograph=False)
    def step(a, b):
        ys = tower(a), tower(b)
        # Otherwise, one call would run after the other on one core.
        with tf.control_dependencies(ys):
            seed = tf.identity(1.0)
        return [
            grad
            for x, y in zip((a, b), ys, strict=True)
            for grad in ms.gradients(y, x, grad_ys=seed, budget=0.6, planner="chain")
        ]

    batch = tf.ones([2**18]), tf.ones([2**18]) * 0.5
    step.get_concrete_function(*batch)
    (plan,) = ms.plans(step)
    peak = measure_peak(lambda: [g.numpy() for g in step(*batch)]).peak
    return peak, plan.whole_step, plan.budget


def test_calls_of_one_forward_pass_have_one_plan() -> None:
    peak, need, budget = fresh("tests.engine.test_several_calls:peaks_together")
    assert 0.7 * need <= peak <= budget
    assert need <= budget


def test_what_a_step_takes_beside_its_gradients_counts() -> None:
    @tf.function(autograph=False)
    def step(x: tf.Tensor, z: tf.Tensor, budget: int) -> tf.Tensor:
        found = [ms.gradients(tower(one), one, budget=budget, planner="chain")[0] for one in (x, z)]
        return tf.tile(sum(found), [64])

    spec = tf.TensorSpec([2**14])
    with pytest.raises(ms.errors.BudgetError) as refused:
        step.get_concrete_function(spec, spec, 10 * UNIT)
    least = refused.value.least
    assert least > 64 * UNIT
    with pytest.warns(ms.errors.PlanNote, match="meets the budget"):
        step.get_concrete_function(spec, spec, least)
