"""The bytes that the rest of a step takes are known when the graph is complete, and count."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from tests.helpers.greedy import greedy
from tests.helpers.versions import needs_keras

BudgetWarning = ms.errors.BudgetWarning
WIDTH = 128
#: In smaller models, these optimizers' updates take more than a budget leaves.
LAYERS = {"RMSprop": 16, "Muon": 16}


def model(optimizer: keras.optimizers.Optimizer, layers: int) -> keras.Model:
    dense = [keras.layers.Dense(WIDTH, activation="gelu") for _ in range(layers)]
    found = keras.Sequential([keras.Input([WIDTH]), *dense])
    found.compile(optimizer, "mse", jit_compile=False)
    return found


OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "momentum": lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
    "AdamW": lambda: keras.optimizers.AdamW(1e-3),
    "Adam": lambda: keras.optimizers.Adam(1e-3),
    "RMSprop": lambda: keras.optimizers.RMSprop(1e-3, momentum=0.9, centered=True),
    "clipped": lambda: keras.optimizers.SGD(1e-3, momentum=0.9, global_clipnorm=1.0),
    "clipped Adam": lambda: keras.optimizers.Adam(1e-3, global_clipnorm=1.0),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(1e-3, global_clipnorm=1.0)
    ),
    "accumulated": lambda: keras.optimizers.Adam(1e-3, gradient_accumulation_steps=2),
    "Lamb": lambda: keras.optimizers.Lamb(1e-3),
    "Muon": lambda: keras.optimizers.Muon(1e-3),
}


def fit(optimizer: keras.optimizers.Optimizer, budget: float | str, layers: int = 10) -> Any:
    x = np.zeros([256, WIDTH], "f")
    saving = ms.keras.MemorySavingGradients(budget=budget, planner=greedy, batch_size=256)
    model(optimizer, layers).fit(x, x, batch_size=256, verbose=0, callbacks=[saving])
    return saving


def each_optimizer(*fast: str) -> list[Any]:
    """Return the names of all optimizers as parameters; all but ``fast`` are in the slow suite."""
    return [
        pytest.param(
            name,
            marks=[needs_keras(f"optimizers.{name}")] * (name in ("Lamb", "Muon"))
            + [pytest.mark.slow] * (name not in fast),
        )
        for name in OPTIMIZERS
    ]


@pytest.mark.parametrize("name", each_optimizer("momentum", "Adam", "clipped"))
def test_gradients_leave_room_for_the_optimizer(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        (plan,) = fit(OPTIMIZERS[name](), 0.6, LAYERS.get(name, 10)).plans
    assert plan.whole_step is not None
    assert plan.budget is not None
    assert plan.allocated <= plan.whole_step <= plan.budget
    assert f"the whole step takes at most {plan.whole_step:,}" in str(plan)


def test_the_least_budget_counts_what_the_optimizer_takes() -> None:
    with pytest.raises(ms.errors.BudgetError) as caught:
        fit(keras.optimizers.RMSprop(1e-3), 0.01)
    (plan,) = fit(keras.optimizers.RMSprop(1e-3), caught.value.least).plans
    assert plan.whole_step is not None
    assert plan.whole_step <= caught.value.least == plan.budget


def returning_all(**settings: Any) -> None:
    """Trace a step that returns all its gradients, which take more than its activations."""
    weights = [tf.Variable(tf.zeros([WIDTH, WIDTH])) for _ in range(12)]

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.tanh(x @ weight)
            loss = tf.reduce_sum(x)
        return [loss, *tape.gradient(loss, weights)]

    with ms.patched(planner=greedy, **settings):
        step.get_concrete_function(tf.zeros([32, WIDTH]))


def test_gradients_that_a_function_returns_are_held() -> None:
    with pytest.raises(ms.errors.BudgetError) as caught:
        returning_all(budget=0.01)
    assert caught.value.least > 12 * WIDTH * WIDTH * 4
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        warnings.simplefilter("ignore", ms.errors.PlanNote)
        returning_all(budget=caught.value.least)


@pytest.mark.parametrize("budget", [0.6, "16 MB"])
def test_an_optimizer_that_waits_for_its_gradients_is_worth_no_word(budget: float | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ms.errors.PlanNote)
        warnings.simplefilter("error", BudgetWarning)
        fit(keras.optimizers.SGD(1e-3), budget)


def patched_step(held: bool) -> None:
    """Trace a step in which one tensor, as large as all others together, may live to the end."""
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
    with pytest.raises(ms.errors.BudgetError) as caught:
        patched_step(held=True)
    assert caught.value.fraction > 0.6
    patched_step(held=False)
