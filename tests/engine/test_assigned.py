"""Budgets under XLA are kept in the bytes that XLA assigns to the whole step."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.xla.program import compiled
from memsaving_gradients.engine.assigned.shares import next_share
from memsaving_gradients.errors import BudgetError, BudgetWarning, PlanNote

LAYERS, WIDTH, BATCH = 10, 32, 256
X = np.linspace(-1, 1, BATCH * WIDTH, dtype=np.float32).reshape(BATCH, WIDTH)


def _weights():
    return [
        tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], [k, 1]) / 6) for k in range(LAYERS)
    ]


def _loss(x, weights):
    for w in weights:
        x = tf.tanh(x @ w)
    return tf.reduce_mean(x * x)


def _step(weights, budget=None, gradients=None):
    """Return a training step with momentum that XLA compiles."""
    slots = [tf.Variable(tf.zeros_like(w)) for w in weights]

    @tf.function(jit_compile=True, autograph=False)
    def step(x):
        loss = _loss(x, weights)
        asked = {} if budget is None else {"budget": budget}
        grads = (gradients or ms.gradients if asked else tf.gradients)(loss, weights, **asked)
        for w, slot, grad in zip(weights, slots, grads, strict=True):
            slot.assign(0.9 * slot + grad)
            w.assign_sub(0.1 * slot)
        return loss

    return step


def _assigned(step, x=X):
    return compiled(step.get_concrete_function(x).graph, batch=1).assignment.transient


@pytest.fixture(scope="module")
def plain():
    return _assigned(_step(_weights()))


@pytest.mark.parametrize("budget", [0.8, 0.5, "bytes"])
def test_a_budget_is_kept_in_xlas_bytes(budget, plain):
    limit = plain // 2 if budget == "bytes" else budget
    step = _step(_weights(), limit)
    taken = _assigned(step)
    assert taken <= (limit if budget == "bytes" else limit * plain)
    # The plan uses most of the budget: the planner has enough tensors to choose from.
    assert taken >= 0.7 * (limit if budget == "bytes" else limit * plain)
    (plan,) = ms.plans(step)
    assert (plan.allocated_plain, plan.allocated) == (plain, taken)
    assert plan.slack >= 0
    assert "as XLA assigns" in str(plan)


def test_training_is_the_same():
    trained = []
    for budget in (None, 0.5):
        weights = _weights()
        step = _step(weights, budget)
        losses = [float(step(X)) for _ in range(3)]
        trained.append((losses, [w.numpy() for w in weights]))
    np.testing.assert_allclose(trained[1][0], trained[0][0], rtol=1e-5)
    for mine, theirs in zip(trained[1][1], trained[0][1], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_the_least_that_an_error_names_is_kept():
    weights = _weights()[:4]
    plain = _assigned(_step(weights))
    with pytest.raises(BudgetError, match=f"of the {plain:,} bytes of plain") as refused:
        _step(weights, 1000)(X)
    least = refused.value.least
    assert _assigned(_step(weights, least)) <= least < plain


def test_plain_training_that_fits_stays_plain(plain):
    step = _step(_weights(), plain)
    with pytest.warns(PlanNote, match=f"{plain:,}") as noted:
        assert _assigned(step) == plain
    assert len(noted) == 1
    assert not ms.plans(step)[0].clones


def test_two_calls_share_a_budget():
    ours, theirs = _weights(), _weights()

    def step(gradients):
        @tf.function(jit_compile=True, autograph=False)
        def compute(x):
            first = gradients(_loss(x, ours), ours)
            second = gradients(_loss(2.0 * x, theirs), theirs)
            return [tf.reduce_sum(g * g) for g in [*first, *second]]

        return compute

    plain, planned = step(tf.gradients), step(lambda y, xs: ms.gradients(y, xs, budget=0.5))
    assert _assigned(planned) <= 0.5 * _assigned(plain)
    assert len(ms.plans(planned)) == 2
    for mine, other in zip(planned(X), plain(X), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4)


def test_gradients_of_gradients_are_planned_once():
    weights = _weights()[:3]

    def step(gradients):
        @tf.function(jit_compile=True, autograph=False)
        def compute(x):
            slope = gradients(_loss(x, weights), x)[0]
            return [tf.reduce_sum(g * g) for g in gradients(tf.reduce_sum(slope**2), weights)]

        return compute

    plain, planned = step(tf.gradients), step(lambda y, xs: ms.gradients(y, xs, budget=0.8))
    assert _assigned(planned) <= 0.8 * _assigned(plain)
    assert len(ms.plans(planned)) == 1
    for mine, other in zip(planned(X), plain(X), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4)


def test_tapes_in_a_function_around_and_a_batch_that_nobody_knows():
    weights = _weights()

    @tf.function(input_signature=[tf.TensorSpec([None, WIDTH])], jit_compile=True, autograph=False)
    def inner(x):
        with tf.GradientTape() as tape:
            loss = _loss(x, weights)
        grads = tape.gradient(loss, weights)
        for w, grad in zip(weights, grads, strict=True):
            w.assign_sub(0.1 * grad)
        return loss

    @tf.function(autograph=False)
    def around(x):
        return inner(x) + 1.0

    with ms.patched(budget=0.7, batch_size=BATCH):
        before = float(around(X))
    (plan,) = ms.plans(inner)
    assert plan.assigned and plan.allocated <= 0.7 * plan.allocated_plain
    assert float(around(X)) < before


def test_variables_of_the_first_trace():
    made = []

    @tf.function(jit_compile=True, autograph=False)
    def step(x):
        if not made:
            made.extend(_weights())
        return [tf.reduce_sum(g * g) for g in ms.gradients(_loss(x, made), made, budget=0.6)]

    step(X)
    assert ms.plans(step)[-1].assigned
    # The first trace creates the variables and never runs. The plan is for the trace that runs.
    assert ms.plans(step)[-1].allocated <= 0.6 * ms.plans(step)[-1].allocated_plain


def test_what_xla_cannot_compile_has_a_budget_of_simulated_bytes():
    weights = _weights()

    @tf.function(jit_compile=True, autograph=False)
    def step(x, length):
        loss = _loss(tf.reshape(x, [length, WIDTH]), weights)
        return [tf.reduce_sum(g * g) for g in ms.gradients(loss, weights, budget=0.6)]

    with pytest.warns(BudgetWarning, match=r"budget=0\.6 counts simulated bytes"):
        # XLA knows the shape of this tensor only when the step runs.
        step.get_concrete_function(tf.TensorSpec(X.shape), tf.TensorSpec([], tf.int32))
    plan = ms.plans(step)[-1]
    assert plan.clones and not plan.assigned


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_shares_fall(share):
    for assigned in (60, 99, 100, 130):
        assert next_share(100, share, assigned, 50) < share
