"""Several calls for gradients in one step: each keeps its budget, and what they do not keep
together is said."""

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
    """Gradients of two towers that have nothing in common."""
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


def peaks_together() -> tuple[int, int]:
    from graph_tools.memory.measure import measure_peak

    @tf.function(autograph=False)
    def step(a, b):
        ys = tower(a), tower(b)
        # One core would run one call after the other.
        with tf.control_dependencies(ys):
            seed = tf.identity(1.0)
        return [
            grad
            for x, y in zip((a, b), ys, strict=True)
            for grad in ms.gradients(y, x, grad_ys=seed, budget=0.5, planner="chain")
        ]

    batch = tf.ones([2**18]), tf.ones([2**18]) * 0.5
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", BudgetWarning)
        step.get_concrete_function(*batch)
    (text,) = [str(w.message) for w in said if w.category is BudgetWarning]
    need = int(re.findall(r"take ([\d,]+)", text)[0].replace(",", ""))
    return measure_peak(lambda: [g.numpy() for g in step(*batch)]).peak, need


def test_what_the_step_may_take_is_about_what_it_takes() -> None:
    peak, need = fresh("tests.engine.test_several_calls:peaks_together")
    assert 0.7 * need <= peak <= 1.2 * need


def test_a_step_that_takes_more_than_was_said_is_said_again() -> None:
    @tf.function(autograph=False)
    def step(x: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
        found = [
            ms.gradients(tower(one), one, budget=10 * UNIT, planner="chain")[0] for one in (x, z)
        ]
        return tf.tile(sum(found), [64])

    spec = tf.TensorSpec([2**14])
    with pytest.warns(BudgetWarning) as said:
        step.get_concrete_function(spec, spec)
    texts = [str(w.message) for w in said if w.category is BudgetWarning]
    first, last = (int(re.findall(r"take ([\d,]+)", t)[0].replace(",", "")) for t in texts)
    assert first < 64 * UNIT < last
