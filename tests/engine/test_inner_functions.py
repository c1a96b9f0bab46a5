"""Functions with budgets of their own, called several times by another function."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.tf_private import graphs, loops
from memsaving_gradients.errors import BudgetWarning, PlanNote

PARTS, WIDTH = 4, 32

pytestmark = pytest.mark.filterwarnings(f"ignore::{PlanNote.__module__}.PlanNote")


def weights() -> list[tf.Variable]:
    shape = [WIDTH, WIDTH]
    return [tf.Variable(tf.random.stateless_normal(shape, [k, 0]) / 8) for k in range(4)]


def gradients(x: tf.Tensor, ws: list[tf.Variable]) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        for w in ws:
            x = tf.tanh(x @ w)
        loss = tf.reduce_sum(x)
    return tape.gradient(loss, ws)


def calls_of(step: Callable[..., object], *args: tf.Tensor) -> list[tf.Operation]:
    graph = step.get_concrete_function(*args).graph
    return [op for op in graph.get_operations() if op.type in loops.CALLS]


def accumulated(ws: list[tf.Variable]) -> Callable[[tf.Tensor], list[tf.Tensor]]:
    """Return a step that adds up the gradients that an inner function computes for each part."""
    inner = tf.function(lambda part: gradients(part, ws))

    @tf.function
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        total = [tf.zeros_like(w) for w in ws]
        for part in tf.split(x, PARTS):
            total = [a + b for a, b in zip(total, inner(part), strict=True)]
        return total

    return step


def test_independent_calls_take_turns_and_a_warning_names_the_bytes() -> None:
    ws, x = weights(), tf.random.stateless_normal([PARTS * 8, WIDTH], [0, 1])
    plain = accumulated(ws)(x)
    step = accumulated(ws)
    with ms.patched(budget=1.0), pytest.warns(BudgetWarning, match="called 4 times") as caught:
        found = step(x)
    assert "in the outermost tf.function" in str(caught.pop(BudgetWarning).message)
    calls = calls_of(step, x)
    assert len(calls) == PARTS
    for before, call in itertools.pairwise(calls):
        assert before in call.control_inputs
    added = {reader for call in calls[:-1] for out in call.outputs for reader in out.consumers()}
    assert all(graphs.is_protected(op) for op in added if op.type == "AddV2")
    for one, other in zip(plain, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_calls_that_follow_one_another_stay_as_they_are() -> None:
    ws, x = weights(), tf.random.stateless_normal([PARTS * 8, WIDTH], [0, 1])

    def steps() -> Callable[[tf.Tensor], None]:
        @tf.function
        def train(part: tf.Tensor) -> None:
            for w, grad in zip(ws, gradients(part, ws), strict=True):
                w.assign_sub(1e-3 * grad)

        @tf.function
        def several(x: tf.Tensor) -> None:
            for part in tf.split(x, PARTS):
                train(part)

        return several

    plain, step = calls_of(steps(), x), steps()
    with ms.patched(budget=1.0), warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        step(x)
    controls = [len(call.control_inputs) for call in calls_of(step, x)]
    assert controls == [len(call.control_inputs) for call in plain]
