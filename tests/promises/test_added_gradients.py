"""Gradients of microbatches that a step adds up by hand, measured: grappler would hold all of them
until the last one is there."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.memory.measure import measure_peak
from tests.helpers.fresh import fresh

LAYERS, WIDTH, ROWS, PARTS = 4, 512, 32, 6
#: Bytes of the gradients of one microbatch.
GRADIENTS = LAYERS * 4 * WIDTH**2


def train(x: tf.Tensor, ws: list[tf.Variable]) -> list[tf.Tensor]:
    """Return the sum of the gradients of all parts of a batch."""
    total: list[tf.Tensor] | None = None
    for part in tf.split(x, PARTS):
        with tf.GradientTape() as tape:
            h = part
            for w in ws:
                h = tf.tanh(h @ w)
            loss = tf.reduce_sum(h)
        grads = tape.gradient(loss, ws)
        total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
    assert total is not None
    for w, g in zip(ws, total, strict=True):
        w.assign_sub(1e-3 * g)
    return total


def steps(budget: float) -> dict[str, Any]:
    """Return the measured peaks of steps, their budget, and the variables after the first one."""
    ws = [
        tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], [k, 0]) / WIDTH**0.5)
        for k in range(LAYERS)
    ]
    x = tf.random.stateless_normal([PARTS * ROWS, WIDTH], [0, 1])
    with ms.patched(budget=budget):
        step = tf.function(lambda: tf.add_n(list(map(tf.reduce_sum, train(x, ws)))))
        graph = step.get_concrete_function().graph
    float(step())
    after = [w.numpy() for w in ws]
    plans = ms.plans(graph)
    return {
        "peaks": measure_peak(step, warmup=2, steps=5).peaks,
        "budget": max((plan.budget or 0 for plan in plans), default=0),
        "after": after,
    }


def test_added_gradients_keep_a_budget_below_what_all_of_them_take() -> None:
    plain, planned = (fresh(f"{__name__}:steps", budget=budget) for budget in (1.0, 0.5))
    # Addends and their sum would take more than the budget.
    assert max(planned["peaks"]) <= planned["budget"] < (PARTS - 1) * GRADIENTS
    assert min(plain["peaks"]) > planned["budget"]
    for one, other in zip(plain["after"], planned["after"], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
