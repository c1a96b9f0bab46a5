"""Calls for gradients inside of another call, with a budget."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms

LAYERS, WIDTH = 12, 64


@pytest.fixture(scope="module")
def weights():
    return [
        tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], [k, 0]) / WIDTH**0.5)
        for k in range(LAYERS)
    ]


def network(x, ws):
    for w in ws:
        x = tf.tanh(x @ w)
    return x


def batch():
    return tf.random.stateless_normal([256, WIDTH], [0, 1])


def penalty(x, ws):
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = network(x, ws)
        slope = inner.gradient(y, x)
        loss = tf.reduce_mean(slope**2) + tf.reduce_mean(network(x, ws) ** 2)
    return tape.gradient(loss, ws)


def inside(x, ws, *, persistent):
    """Return gradients that are computed while their own tape still records."""
    with tf.GradientTape(persistent=persistent) as tape:
        loss = tf.reduce_mean(network(x, ws) ** 2)
        return tape.gradient(loss, ws)


def lonely(x, ws):
    """Return gradients computed inside of a tape that is never asked for any."""
    with tf.GradientTape():
        with tf.GradientTape() as inner:
            loss = tf.reduce_mean(network(x, ws) ** 2)
        return [2.0 * g for g in inner.gradient(loss, ws)]


def run(function, ws, **options):
    """Return the gradients under `patched` and the plans; without options, plain gradients."""
    step = tf.function(lambda x: function(x, ws), autograph=False, **options.pop("how", {}))
    if not options:
        return step(batch()), []
    with ms.patched(**options):
        found = step(batch())
    return found, ms.plans(step)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("budget", [0.6, "2.5MB"])
def test_a_penalty_has_one_plan_for_both_calls(weights, budget):
    expected, _ = run(penalty, weights)
    found, plans = run(penalty, weights, budget=budget)
    (plan,) = plans
    assert plan.clones and plan.allocated <= plan.budget
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("persistent", [False, True])
def test_a_tape_is_not_inside_of_itself(weights, persistent):
    def function(x, ws):
        return inside(x, ws, persistent=persistent)

    found, (plan,) = run(function, weights, budget=0.6)
    assert plan.clones
    for mine, theirs in zip(found, run(function, weights)[0], strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_no_outer_call_comes_for_is_planned_by_itself(weights, compiled):
    how = {"jit_compile": compiled}
    found, (plan,) = run(lonely, weights, budget=0.7, planner="chain", how=how)
    assert plan.clones
    for mine, theirs in zip(found, run(lonely, weights, how=how)[0], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-9)


def test_a_tape_around_the_function_plans_nothing_in_it(weights):
    x = batch()
    step = tf.function(lambda x: inside(x, weights, persistent=False), autograph=False)
    expected = step(x)
    step = tf.function(lambda x: inside(x, weights, persistent=False), autograph=False)
    ms.patch(budget=0.6)
    try:
        with tf.GradientTape() as tape:
            found = step(x)
            penalty = tf.reduce_sum(found[0] ** 2)
    finally:
        ms.unpatch()
    assert ms.plans(step)[-1].clones
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-9)
    assert float(tf.reduce_max(tf.abs(tape.gradient(penalty, weights)[0]))) > 0
