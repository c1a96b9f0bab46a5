"""Gradients of microbatches that a step adds up by hand, measured: grappler, or the step's own
``tf.add_n``, would hold all of them until the last one is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.memory.measure import measure_peak
from tests.helpers.fresh import fresh

LAYERS, WIDTH, ROWS, PARTS = 4, 512, 32, 6
#: Bytes of the gradients of one microbatch.
GRADIENTS = LAYERS * 4 * WIDTH**2


#: Ways to add a gradient to the sum of those before.
ADDITIONS: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "plus": lambda a, b: a + b,
    "identity": lambda a, b: tf.stop_gradient(tf.identity(a + b)),
    "reshaped": lambda a, b: tf.reshape(a + b, [WIDTH, WIDTH]),
    "decayed by 1": lambda a, b: 1.0 * a + b,
    "broadcast": lambda a, b: a + 1e-6 + b,
    "row": lambda a, b: a + b + 1e-3 * tf.reduce_mean(b, 0),
    "dead readers": lambda a, b: a + b,
}
#: Ways to add all gradients at once.
SUMS = {"add_n": tf.add_n, "accumulate_n": tf.math.accumulate_n}


def train(x: tf.Tensor, ws: list[tf.Variable], way: str) -> list[tf.Tensor]:
    """Update variables by the sum of the gradients of all parts of a batch, and return the sum."""
    found: list[list[tf.Tensor]] = []
    for part in tf.split(x, PARTS):
        with tf.GradientTape() as tape:
            h = part
            for w in ws:
                h = tf.tanh(h @ w)
            loss = tf.reduce_sum(h)
        grads = tape.gradient(loss, ws)
        if way in ADDITIONS and found:
            grads = [ADDITIONS[way](a, b) for a, b in zip(found.pop(), grads, strict=True)]
        found.append(grads)
        if way == "dead readers":
            tf.linalg.global_norm(grads)
    total = [SUMS.get(way, tf.add_n)(grads) for grads in zip(*found, strict=True)]
    for w, g in zip(ws, total, strict=True):
        w.assign_sub(1e-3 * g)
    return total


def steps(way: str, budget: float, exact: bool = False) -> dict[str, Any]:
    """Return the measured peaks of steps, their budget, and the variables after the first one.

    ``exact``: whether TensorFlow gives the same bits each time and as it was programmed.
    """
    if exact:
        tf.config.experimental.enable_op_determinism()
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    ws = [
        tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], [k, 0]) / WIDTH**0.5)
        for k in range(LAYERS)
    ]
    x = tf.random.stateless_normal([PARTS * ROWS, WIDTH], [0, 1])
    with ms.patched(budget=budget):
        step = tf.function(lambda: tf.add_n(list(map(tf.reduce_sum, train(x, ws, way)))))
        graph = step.get_concrete_function().graph
    float(step())
    after = [w.numpy() for w in ws]
    plans = ms.plans(graph)
    return {
        "peaks": measure_peak(step, warmup=2, steps=5).peaks,
        "budget": max((plan.budget or 0 for plan in plans), default=0),
        "after": after,
    }


@pytest.mark.parametrize("way", [*ADDITIONS, *SUMS])
def test_added_gradients_keep_a_budget_below_what_all_of_them_take(way: str) -> None:
    # Sums of all gradients at once are simulated to take more than they do.
    most = 0.75 if way in SUMS else 0.6
    plain, planned = (fresh(f"{__name__}:steps", way=way, budget=budget) for budget in (1.0, most))
    # Addends and their sum would take more than the budget.
    assert max(planned["peaks"]) <= planned["budget"] < (PARTS - 1) * GRADIENTS
    assert min(plain["peaks"]) > planned["budget"]
    for one, other in zip(plain["after"], planned["after"], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_gradients_that_add_n_adds_have_the_same_bits() -> None:
    plain, planned = (
        fresh(f"{__name__}:steps", way="add_n", budget=budget, exact=True) for budget in (1.0, 0.75)
    )
    assert max(planned["peaks"]) <= planned["budget"] < min(plain["peaks"])
    for one, other in zip(plain["after"], planned["after"], strict=True):
        np.testing.assert_array_equal(one, other)


LITTLE = 32
#: Sums in which the kernel begins with the first, or with a later addend.
ORDERS: dict[str, Callable[[list[tf.Tensor], tf.Variable], tf.Tensor]] = {
    "all": lambda grads, w: tf.add_n(grads),
    "twice": lambda grads, w: tf.add_n([tf.identity(grads[0]), *grads]),
    "held": lambda grads, w: tf.add_n([w, tf.fill([LITTLE, LITTLE], 0.3), *grads]),
    "decay": lambda grads, w: tf.add_n([*grads, 1e-2 * w]),
    "sums": lambda grads, w: tf.add_n([tf.add_n(grads[:3]), tf.add_n(grads[3:]), 2.0 * grads[0]]),
}


def of_sums(add: str, parts: int, budget: float) -> list[bytes]:
    """Return the bytes of sums of the gradients of microbatches; ``add``: how they are added."""
    tf.config.experimental.enable_op_determinism()
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    shape = [LITTLE, LITTLE]
    ws = [tf.Variable(tf.random.stateless_normal(shape, [k, 0]) / LITTLE**0.5) for k in range(5)]

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        found = []
        for h in tf.split(x, parts):
            for w in ws:
                h = tf.tanh(h @ w)
            found.append(tf.gradients(tf.reduce_sum(h * h), ws))
        return [
            ORDERS[add]([*grads], w) for w, grads in zip(ws, zip(*found, strict=True), strict=True)
        ]

    x = tf.random.stateless_normal([1024 * parts, LITTLE], [0, 1])
    with ms.patched(budget=budget):
        found = step(x)
    return [tensor.numpy().tobytes() for tensor in found]


@pytest.mark.parametrize(
    ("add", "parts"),
    [("all", 4), ("all", 9), ("all", 12), *((add, 6) for add in ORDERS if add != "all")],
)
def test_sums_have_the_bits_of_the_kernel_whichever_addend_it_begins_with(
    add: str, parts: int
) -> None:
    plain, planned = (
        fresh(f"{__name__}:of_sums", add=add, parts=parts, budget=budget) for budget in (1.0, 0.95)
    )
    assert plain == planned
