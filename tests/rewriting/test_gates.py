"""Gates of recomputed loops."""

from __future__ import annotations

import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.tf_private import loops
from tests.helpers.support import numbers

ROWS, WIDTH, LAYERS = 2048, 64, 6


@pytest.mark.parametrize("counted_from", ["zero", "a tensor"])
def test_no_step_of_a_recomputed_loop_runs_ahead(counted_from):
    """The first step of each loop can compute a value before the layer's input exists. A loop that
    ran ahead would hold this value from the beginning of the training step."""

    @tf.function
    def step(x, w, first):
        h = x
        for _ in range(LAYERS):
            begin = 0 if counted_from == "zero" else first
            h = tf.matmul(_solved(tf.matmul(h, w), w, begin), w)
        return ms.gradients(tf.reduce_sum(tf.square(h)), w, budget=0.45)

    x, w = numbers("x", ROWS, WIDTH), numbers("w", WIDTH, WIDTH, scale=0.1)
    graph = step.get_concrete_function(tf.constant(x), tf.constant(w), tf.constant(0)).graph
    recomputed = [
        op for op in graph.get_operations() if op.type in loops.LOOPS and "_recomputed" in op.name
    ]
    assert len(recomputed) > 1
    for op in recomputed:
        original = graph.get_operation_by_name(op.name.split("_recomputed")[0])
        read = loops.function_graph(original, "cond").inputs
        decides = [t for t, inner in zip(op.inputs, read, strict=True) if inner.consumers()]
        assert any(t.op.control_inputs for t in decides), op.name


@tf.custom_gradient
def _solved(u, w, first):
    """Return a fixed point, differentiated by its own equation."""

    def body(i, z):
        return i + 1, tf.tanh(tf.matmul(0.5 * z, w) + u)

    z = tf.while_loop(lambda i, _: i < 5, body, (first, tf.zeros_like(u)))[1]
    z = tf.stop_gradient(z)

    def gradient(dz):
        du = (1 - z * z) * dz
        return du, 0.5 * tf.matmul(z, du, transpose_a=True), None

    return z, gradient
