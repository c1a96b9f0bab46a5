"""The backward pass as a row of conditionals, under XLA."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.xla.program import compiled


def _images(batch):
    return tf.random.stateless_normal([batch, 12, 12, 4], [1, 2])


def _network(x, filters):
    for k, w in enumerate(filters):
        x = tf.nn.conv2d(x, w, 1, "SAME")
        mean, variance = tf.nn.moments(x, [0, 1, 2])
        x = tf.nn.relu((x - mean) * tf.math.rsqrt(variance + 1e-3))
        if k == 3:
            x = tf.nn.max_pool2d(x, 2, 1, "SAME")
    return tf.reduce_mean(x * x)


def _filters(count=12):
    return [tf.Variable(tf.random.stateless_normal([3, 3, 4, 4], [k, 3]) / 3) for k in range(count)]


@pytest.mark.parametrize("batch", [3, None])
def test_gradients_with_and_without_a_known_batch(batch):
    filters, x = _filters(), _images(3)
    signature = [tf.TensorSpec([batch, 12, 12, 4], tf.float32)]

    def step(gradients):
        def compute(x):
            return gradients(_network(x, filters), filters)

        return tf.function(compute, signature, jit_compile=True, autograph=False)

    ours = step(ms.gradients)
    for mine, theirs in zip(ours(x), step(tf.gradients)(x), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())
    graph = ours.get_concrete_function().graph
    assert ms.plans(graph)[-1].clones
    assert sum(op.type == "StatelessIf" for op in graph.get_operations()) > 2


def test_what_cannot_be_in_a_branch_parts_a_region():
    """The gradient of rows that are looked up in a variable reads the variable's handle."""
    table = tf.Variable(tf.random.stateless_normal([50, 16], [1, 1]))
    weights = [tf.Variable(tf.random.stateless_normal([16, 16], [k, 3]) / 4) for k in range(16)]
    ids = tf.constant([[1, 2, 3], [2, 7, 49]])

    def loss(ids):
        x = tf.reshape(tf.gather(table, ids), [-1, 16])
        for w in weights:
            x = tf.tanh(x @ w) + x
        return tf.reduce_sum(x * x)

    def step(gradients):
        def compute(ids):
            return [tf.convert_to_tensor(g) for g in gradients(loss(ids), [table, *weights])]

        return tf.function(compute, jit_compile=True, autograph=False)

    for mine, theirs in zip(step(ms.gradients)(ids), step(tf.gradients)(ids), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())


def test_xla_assigns_less():
    filters, x = _filters(16), _images(32)
    sizes, counts = {}, {}
    for gradients in (ms.gradients, tf.gradients):

        @tf.function(jit_compile=True, autograph=False)
        def step(x, gradients=gradients):
            grads = gradients(_network(x, filters), filters)
            return [tf.reduce_sum(g * g) for g in grads]

        program = compiled(step.get_concrete_function(x).graph, batch=1)
        ours = gradients is ms.gradients
        sizes[ours], counts[ours] = program.assignment.temporaries, program.module.counts()
    assert sizes[True] < 0.5 * sizes[False]
    # Convolutions that were recomputed are still there: neither merged nor moved out.
    assert counts[True]["convolution"] >= counts[False]["convolution"] + 12
