"""Losses on each hidden value, as branches or as loops over its rows: what they take, and budgets
that hold with them."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.ops.variant_bytes import variant_bytes
from memsaving_gradients.rewriting.gates import fixed_inputs
from tests.helpers.fresh import fresh
from tests.transforms.test_loops_random import always_replayed

ROWS, WIDTH = 1024, 128
HIDDEN = 4 * ROWS * WIDTH


def cond(h: tf.Tensor) -> tf.Tensor:
    return tf.cond(
        tf.reduce_sum(h[0]) < 1e9,
        lambda: tf.reduce_mean(h * h),
        lambda: tf.reduce_mean(tf.abs(h)),
    )


def case(h: tf.Tensor) -> tf.Tensor:
    which = tf.cast(tf.reduce_sum(h[0]) > 1e9, tf.int32)
    return tf.switch_case(
        which, [lambda: tf.reduce_mean(h * tf.sin(h)), lambda: tf.reduce_mean(tf.abs(h))]
    )


def mapped(h: tf.Tensor) -> tf.Tensor:
    rows = tf.reshape(h, [16, -1])
    sums = tf.map_fn(lambda r: tf.reduce_sum(r * r), rows, fn_output_signature=tf.float32)
    return tf.reduce_mean(sums)


LOSSES = {"cond": cond, "case": case, "mapped": mapped}
#: Budgets as parts of plain training's memory. Values that a branch of `case` keeps for its
#: gradient are not recomputed.
BUDGETS = {"cond": 0.5, "case": 0.75, "mapped": 0.5}
#: Losses, and the number of layers. Loops take long to plan within a budget.
BUDGETED = [
    ("cond", 6),
    pytest.param("case", 6, marks=pytest.mark.slow),
    *(pytest.param(loss, 10, marks=pytest.mark.slow) for loss in LOSSES),
]


def make_step(loss: str, depth: int, **options: Any) -> Any:
    weights = [
        tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], [k, 1]) / 10) for k in range(depth)
    ]

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        h, total = x, tf.constant(0.0)
        for w in weights:
            h = tf.nn.relu(tf.tanh(h @ w))
            total += LOSSES[loss](h)
        if options:
            return ms.gradients(total, weights, **options)
        return tf.gradients(total, weights)

    return step


def run(loss: str, depth: int, budget: float) -> dict[str, int]:
    """Return the bytes of a step without and with a budget, the simulated peak of plain training,
    and the budget."""
    from benchmarks.allocation_trace import allocation_events, requested_peak

    x = tf.random.stateless_normal([ROWS, WIDTH], [1, 2])
    found = {}
    for name, options in (("plain", {}), ("ours", {"budget": budget})):
        step = make_step(loss, depth, **options)
        for _ in range(2):
            step(x)
        # The number of losses in progress is random: it is seldom one more than simulated.
        traced = [allocation_events(lambda step=step: step(x)) for _ in range(5)]
        found[name] = statistics.median(map(requested_peak, traced))
    (plan,) = ms.plans(step)
    return found | {"plain said": plan.peak_plain, "budget": plan.budget}


@pytest.mark.parametrize(("loss", "depth"), BUDGETED)
def test_a_budget_is_kept(loss, depth):
    what = {"loss": loss, "depth": depth, "budget": BUDGETS[loss]}
    bytes_ = fresh("tests.engine.test_hidden_losses:run", what)
    assert bytes_["plain said"] == pytest.approx(bytes_["plain"], rel=0.2)
    assert bytes_["ours"] <= bytes_["budget"] <= 1.1 * BUDGETS[loss] * bytes_["plain"]


@pytest.mark.parametrize(("loss", "depth"), BUDGETED)
def test_gradients_are_equal(exact, loss, depth):
    check_gradients(loss, depth, budget=BUDGETS[loss])


@pytest.mark.parametrize("loss", ["case", "mapped"])
def test_gradients_without_a_budget_are_equal(exact, loss):
    check_gradients(loss, 4, checkpoints="memory")


def check_gradients(loss, depth, **options):
    x = tf.random.stateless_normal([ROWS, WIDTH], [1, 2])
    ours, plain = make_step(loss, depth, **options)(x), make_step(loss, depth)(x)
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_branches_hand_to_their_gradients_has_bytes(control_flow_v2, graph):
    h = tf.compat.v1.placeholder(tf.float32, [ROWS, WIDTH])
    y = tf.cond(
        tf.reduce_sum(h) > 0,
        lambda: tf.reduce_sum(tf.tanh(tf.sin(h))),
        lambda: tf.reduce_sum(tf.abs(h)),
    )
    tf.gradients(y, h)
    variants = [t for op in graph.get_operations() for t in op.outputs if t.dtype == tf.variant]
    # Only the tangent: the gradients of the sine and of the other branch read the inputs of the
    # branches.
    assert [variant_bytes(t).fixed for t in variants] == [HIDDEN]


def test_zeros_like_a_list_are_as_many_as_it_has(control_flow_v2, graph):
    rows = tf.compat.v1.placeholder(tf.float32, [16, WIDTH])
    tf.gradients(tf.map_fn(lambda r: tf.reduce_sum(r * r), rows), rows)
    lists = [op for op in graph.get_operations() if op.type == "ZerosLike"]
    assert [variant_bytes(op.outputs[0]).fixed for op in lists] == [4 * 16 * WIDTH]


def test_a_replayed_gradient_gives_a_whole_list(control_flow_v2, graph):
    """The gradient is a loop over segments; a loop inside it adds to all elements of the list."""
    rows = tf.compat.v1.placeholder(tf.float32, [16, WIDTH])
    loss = tf.map_fn(lambda r: tf.reduce_sum(r * r), rows)
    with always_replayed(4):
        ms.gradients(loss, rows, checkpoints="memory", loops="segments")
    replayed = [op for op in graph.get_operations() if op.name.endswith("_replayed")]
    sizes = [
        variant_bytes(tensor).fixed
        for op in replayed
        for tensor in op.outputs
        if tensor.consumers() and tensor.dtype == tf.variant
    ]
    assert [size for size in sizes if size] == [4 * 16 * WIDTH]


def test_branches_wait_for_their_predicate_and_loops_for_their_condition(control_flow_v2, graph):
    h = tf.compat.v1.placeholder(tf.float32, [ROWS, WIDTH])
    n = tf.compat.v1.placeholder(tf.int32, [])
    tf.cond(n > 0, lambda: tf.sin(h), lambda: tf.cos(h))
    tf.while_loop(lambda i, y: i < n, lambda i, y: (i + 1, tf.sin(y)), (0, h))
    branch, loop = (
        op for op in graph.get_operations() if op.type in ("StatelessIf", "StatelessWhile")
    )
    waits = {
        op.type: [
            t
            for t, fixed in zip(op.inputs, fixed_inputs(op, [False] * len(op.inputs)), strict=True)
            if not fixed
        ]
        for op in (branch, loop)
    }
    assert waits["StatelessIf"] == [branch.inputs[0]]
    assert any(t is n for t in waits["StatelessWhile"])
    assert not any(t is h for t in waits["StatelessWhile"])
