"""What loops give that are called: the lists of a called function are results of the call."""

from __future__ import annotations

import tensorflow as tf

from graph_tools import _tf_loops
from graph_tools.inside import inside, list_bytes
from graph_tools.loops import trip_count

STEPS, SIZE = 20, 64


@tf.function(autograph=False)
def _looping(x: tf.Tensor) -> tf.Tensor:
    """As many steps as ``x`` has rows, as far as a vector of constants says: Keras 2 counts them so."""
    steps = tf.constant([STEPS, SIZE])[0]
    _, y = tf.while_loop(
        lambda i, h: i < steps, lambda i, h: (i + 1, tf.tanh(tf.sin(h))), (0, x[0])
    )
    return y


def test_lists_of_called_loops_have_bytes() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [STEPS, SIZE])
        tf.gradients(_looping(x), x)
    calls = [op for op in graph.get_operations() if op.type.endswith("PartitionedCall")]
    lists = [
        [list_bytes(out).fixed for out in op.outputs if out.dtype == tf.variant] for op in calls
    ]
    # What the gradients of the sine and of the hyperbolic tangent read, of each step; the backward call gives none.
    assert sorted(lists) == [[], [4 * STEPS * SIZE] * 2]


def test_steps_are_known_by_an_element_of_a_constant() -> None:
    called = _looping.get_concrete_function(tf.TensorSpec([STEPS, SIZE])).graph
    (loop,) = (op for op in called.get_operations() if op.type in _tf_loops.LOOPS)
    assert trip_count(loop) == STEPS


def test_a_call_takes_what_is_alive_inside() -> None:
    @tf.function(autograph=False)
    def called(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.sort(x) * tf.sort(-x))

    with tf.Graph().as_default() as graph:
        called(tf.compat.v1.placeholder(tf.float32, [SIZE, SIZE]))
    (call,) = (op for op in graph.get_operations() if op.type.endswith("PartitionedCall"))
    found = inside(call, 1)
    # Two sorted tensors at least, and no more than what else sorting makes.
    assert found is not None
    assert 2 * 4 * SIZE**2 <= found.workspace <= 8 * 4 * SIZE**2
