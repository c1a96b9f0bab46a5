"""Gates wait for an op that loses a factor to a constant only if each of its factors is held."""

from __future__ import annotations

import tensorflow as tf

import memsaving_gradients as ms
from graph_tools import capture
from graph_tools.grappler.constant_folding import losing
from tests.helpers.support import numbers

WIDTH, ROWS, LAYERS = 64, 1024, 4


def test_gates_of_gelu_wait_for_what_is_still_read(exact):
    ws = [tf.Variable(numbers(f"w{k}", WIDTH, WIDTH) / 8) for k in range(LAYERS)]

    @tf.function(autograph=False)
    def step(h):
        for w in ws:
            h = tf.nn.gelu(h @ w, approximate=True)
        return tf.gradients(tf.reduce_sum(h * h), [w.handle for w in ws])

    x = tf.constant(numbers("x", ROWS, WIDTH))
    plain = step(x)
    step = tf.function(step.python_function, autograph=False)
    with ms.patched(budget=0.6):
        ours = step(x)
    assert ms.plans(step)[0].recomputed
    for a, b in zip(plain, ours, strict=True):
        tf.debugging.assert_equal(a, b)
    graph = step.get_concrete_function(x).graph
    ops = capture(list(graph.outputs))
    lost = {ops.ops[i] for i in losing(ops)}
    assert lost
    waited_for = {other for op in graph.get_operations() for other in op.control_inputs}
    assert waited_for & lost
    for op in waited_for & lost:
        # Each of its factors is held back by an identity, whichever of them it keeps.
        assert all(factor.op.type == "Identity" for factor in op.inputs)
