"""Backward ops that make much of almost nothing run late, unless the graph says when they run."""

from __future__ import annotations

import pytest
import tensorflow as tf

from graph_tools import capture
from tests.support import Inputs, Net, assert_same_gradients, in_session, numbers

LAYERS = 10
BYTES = 64 * 64 * 4


def decayed(p):
    h, penalty = p["x"], 0.0
    for i in range(LAYERS):
        w = p.weight(f"w{i}", 64, 64)
        h = tf.tanh(tf.matmul(h, w))
        penalty += tf.reduce_sum(tf.square(tf.convert_to_tensor(w)))
    return Net(tf.reduce_sum(h) + 1e-3 * penalty)


def scaled(p):
    """The weight of the penalty depends on the data: its gradients are ready when the forward pass ends."""
    net = decayed(p)
    return Net(net.ys * tf.reduce_mean(tf.abs(p["x"])))


def normalized(p):
    """`tf.nn.moments` has gradients with control edges between them."""
    h = p["x"]
    for i in range(LAYERS):
        h = tf.matmul(h, p.weight(f"w{i}", 64, 64))
        mean, variance = tf.nn.moments(h, 0)
        h = tf.tanh(tf.nn.batch_normalization(h, mean, variance, None, None, 1e-3))
    return Net(tf.reduce_sum(h))


@pytest.mark.parametrize("build", [decayed, scaled, normalized])
@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_gradients_are_the_same(build):
    inputs = Inputs({"x": numbers("x", 32, 64)})
    assert_same_gradients(build, inputs, modes=("memory", "speed", None))


@pytest.mark.parametrize("build", [decayed, scaled])
def test_gradients_of_penalties_are_made_one_by_one(build):
    def program(p, gradients):
        net = build(p)
        return gradients(net.ys, list(p.weights.values()))

    plan = in_session(program, Inputs({"x": numbers("x", 8, 64)}), "memory").plans[-1]
    assert plan.peak_plain > LAYERS * BYTES / 2
    # Two threads make one or two ahead of their turn.
    assert plan.peak < plan.peak_plain / 2


def test_the_graph_has_no_cycle():
    import memsaving_gradients as ms

    with tf.Graph().as_default() as graph:
        p = Inputs({"x": numbers("x", 32, 64)})
        p.restart({"x": tf.compat.v1.placeholder(tf.float32, [None, 64])})
        net = normalized(p)
        ms.gradients(net.ys, p.all, checkpoints="memory", batch_size=512)
        capture([op for op in graph.get_operations() if op.outputs or op.control_inputs])
