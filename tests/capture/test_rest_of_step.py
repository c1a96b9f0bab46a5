"""The bytes that the rest of a step takes in addition to gradients, and plans that count them."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.graph.capture import capture
from graph_tools.memory.executor import simulate_execution
from graph_tools.tf_private import autodiff
from memsaving_gradients.capture.rest_of_step import Rest

WIDTH, LAYERS = 128, 4
#: Bytes of one gradient.
BYTES = 4 * WIDTH * WIDTH

_Update = Callable[[list[tf.Variable], list[tf.Tensor]], None]


def rest_of(update: _Update, *, hold: bool = False) -> Rest:
    """Return the bytes that an update of some weights takes in addition to each gradient."""
    weights = [tf.Variable(tf.ones([WIDTH, WIDTH])) for _ in range(LAYERS)]
    found: list[tf.Tensor] = []

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            for w in weights:
                x = tf.tanh(x @ w)
        found[:] = tape.gradient(x, weights)
        update(weights, found)

    graph = step.get_concrete_function(tf.TensorSpec([8, WIDTH])).graph
    gradients = capture(found, late=0)
    whole = capture(autodiff.ends_of(graph))
    _, run = simulate_execution(whole, batch=1)
    return Rest(found, gradients.position.keys(), whole, run, hold)


def _with_a_temporary(weights: list[tf.Variable], grads: list[tf.Tensor]) -> None:
    for w, g in zip(weights, grads, strict=True):
        w.assign_sub(g / (1.0 + tf.sqrt(g * g)))


def _in_place(weights: list[tf.Variable], grads: list[tf.Tensor]) -> None:
    for w, g in zip(weights, grads, strict=True):
        w.assign_sub(g)


def _clipped(weights: list[tf.Variable], grads: list[tf.Tensor]) -> None:
    _in_place(weights, tf.clip_by_global_norm(grads, 1.0)[0])


def test_what_is_made_of_a_gradient_alone() -> None:
    rest = rest_of(_with_a_temporary)
    assert rest.prompt == [BYTES] * LAYERS
    assert all(late >= 0 for late in rest.late)
    assert max(rest.late) >= BYTES
    assert rest_of(_in_place).prompt == [0] * LAYERS
    assert rest.estimates[-1] == [0] * LAYERS


def test_gradients_that_wait_for_all_of_them_add_up() -> None:
    rest = rest_of(_clipped)
    # Gradients come in the order of the layers' backward pass: the first layer's comes last. The
    # bytes in addition to each one are the gradients before it.
    for estimate in (rest.prompt, rest.late):
        assert estimate[::-1][: LAYERS - 1] == pytest.approx(
            np.arange(LAYERS - 1) * BYTES, abs=BYTES // 8
        )
        assert estimate[0] >= (LAYERS - 1) * BYTES


def test_gradients_that_nobody_uses() -> None:
    rest = rest_of(lambda weights, grads: _with_a_temporary(weights[1:], grads[1:]))
    assert rest.prompt == [0, *[BYTES] * (LAYERS - 1)]
    assert rest.late[0] == 0


def test_gradients_that_plans_hold_are_theirs() -> None:
    assert max(rest_of(_clipped, hold=True).prompt) < 3 * BYTES
    assert max(rest_of(_in_place, hold=True).late) == 0


def _plan(budget: float, clip: float | None) -> ms.Plan:
    keras.utils.set_random_seed(1)
    narrow = [keras.layers.Dense(64, activation="gelu") for _ in range(8)]
    wide = [keras.layers.Dense(512) for _ in range(4)]
    model = keras.Sequential([keras.Input([64]), *narrow, *wide])
    optimizer = keras.optimizers.Adam(global_clipnorm=clip)
    optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            for layer in narrow:
                x = layer(x)
            x = tf.reduce_mean(x, 0, keepdims=True)
            for layer in wide:
                x = layer(x)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(x, weights), weights)

    with ms.patched(budget=budget):
        step.get_concrete_function(tf.TensorSpec([2048, 64]))
    (plan,) = ms.plans(step)
    return plan


@pytest.mark.parametrize("clip", [None, 1.0], ids=["alone", "clipped"])
def test_a_budget_is_kept_where_an_optimizer_takes_most(clip: float | None) -> None:
    """The optimizer's largest temporaries are those for the largest weights, whose gradients come
    first in the backward pass."""
    plan = _plan(0.6, clip)
    assert plan.budget is not None
    assert plan.clones
    assert plan.allocated <= plan.budget
