"""Differentiating a rewritten graph again: the gradients of the graph as it was built."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

import memsaving_gradients as ms


def test_second_order_in_a_branch_with_respect_to_a_recomputed_tensor() -> None:
    # In a branch TensorFlow walks on into the graph around it, which was rewritten.
    def slopes(x: tf.Tensor, gradients: Any) -> Any:
        y = x
        for _ in range(16):
            y = tf.sin(y)
        (slope,) = gradients(y, x)
        middle = slope.graph.get_tensor_by_name("Sin_2:0")
        return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.gradients(slope, middle)[0], lambda: x)

    x = tf.linspace(0.1, 1.0, 1000)
    plain = tf.function(slopes, autograph=False)(x, tf.gradients)
    found = tf.function(slopes, autograph=False)(x, ms.gradients)
    np.testing.assert_allclose(found, plain, rtol=1e-6)


def test_rewritten_graph_is_freed() -> None:
    with tf.Graph().as_default() as graph:
        x = y = tf.compat.v1.placeholder(tf.float32, [1000])
        for _ in range(16):
            y = tf.tanh(y)
        ms.gradients(y, x)
    alive = weakref.ref(graph)
    del graph, x, y
    gc.collect()
    assert alive() is None
