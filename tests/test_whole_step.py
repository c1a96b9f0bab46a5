"""What the rest of a step takes beside its gradients is found when the graph is complete, and said."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from tests.greedy import greedy

BudgetWarning = ms.errors.BudgetWarning
WIDTH = 128


def model(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    layers = [keras.layers.Dense(WIDTH, activation="gelu") for _ in range(16)]
    found = keras.Sequential([keras.Input([WIDTH]), *layers])
    found.compile(optimizer, "mse", jit_compile=False)
    return found


def fit(optimizer: keras.optimizers.Optimizer, budget: float | str) -> None:
    x = np.zeros([256, WIDTH], "f")
    saving = ms.keras.MemorySavingGradients(budget=budget, planner=greedy, batch_size=256)
    model(optimizer).fit(x, x, batch_size=256, verbose=0, callbacks=[saving])


def test_momentum_that_is_multiplied_before_there_are_gradients_is_counted() -> None:
    with pytest.warns(BudgetWarning, match="the rest of the step"):
        fit(keras.optimizers.SGD(1e-3, momentum=0.9), 0.6)


@pytest.mark.parametrize("budget", [0.6, "16 MB"])
def test_an_optimizer_that_waits_for_its_gradients_is_worth_no_word(budget: float | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ms.errors.PlanNote)
        warnings.simplefilter("error", BudgetWarning)
        fit(keras.optimizers.SGD(1e-3), budget)


def patched_step(held: bool) -> None:
    """A traced step in which a tensor as large as all others together may live to the end."""
    x = tf.zeros([2**16])

    @tf.function(autograph=False)
    def step(x):
        before = tf.tile(x, [16])
        y = x
        for _ in range(16):
            y = tf.tanh(y)
        (grad,) = tf.gradients(tf.reduce_sum(y), x)
        if not held:
            return grad
        with tf.control_dependencies([grad]):
            return tf.cos(before)[: 2**16] + grad

    with ms.patched(budget=0.6, planner=greedy):
        step.get_concrete_function(x)


def test_what_a_patched_function_holds_besides_is_counted() -> None:
    with pytest.warns(BudgetWarning, match="the rest of the step"):
        patched_step(held=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        patched_step(held=False)
