"""Differentiating a rewritten graph again: the gradients of the graph as it was built."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.editing import original_view
from graph_tools.editing.rewiring import Rewiring


def test_second_order_in_a_branch_with_respect_to_a_recomputed_tensor() -> None:
    # In a branch, TensorFlow also differentiates the outer graph, which was rewritten.
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


def _called(h: tf.Tensor) -> tf.Tensor:
    return tf.function(lambda h: tf.nn.gelu(h) * h, autograph=False)(h)


def _branched(h: tf.Tensor) -> tf.Tensor:
    return tf.cond(tf.reduce_sum(h) > 0, lambda: tf.sin(h) * h, lambda: tf.cos(h) * h)


def _looped(h: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda k, h: k < 5, lambda k, h: (k + 1, tf.tanh(h) * h), (0, h))[1]


def _nested(h: tf.Tensor) -> tf.Tensor:
    def inside(h: tf.Tensor) -> tf.Tensor:
        return tf.cond(tf.reduce_sum(h) > 0, lambda: _looped(h), lambda: _called(h))

    return tf.function(inside, autograph=False)(h)


@pytest.mark.parametrize("part", [_called, _branched, _looped, _nested])
@pytest.mark.parametrize("options", [{}, {"checkpoints": None}], ids=str)
@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_contexts_nest(part: Any, options: dict[str, Any]) -> None:
    """TensorFlow differentiates a call, a branch or a loop while it walks through the outer
    graph."""

    def slopes(x: tf.Tensor, gradients: Any) -> Any:
        y = part(tf.tanh(tf.sin(x)))
        for _ in range(4):
            y = tf.tanh(tf.sin(y))
        found = [gradients(loss, x)[0] for loss in (tf.reduce_sum(y), tf.reduce_sum(y**2))]
        for _ in range(1 if part is _nested else 2):
            found += gradients(tf.reduce_sum(found[-1] ** 2), x)
        return found

    x = tf.linspace(0.1, 1.0, 100)
    plain = tf.function(slopes, autograph=False)(x, tf.gradients)

    def ours(y: Any, x: Any) -> Any:
        return ms.gradients(y, x, **options)

    for theirs, found in zip(plain, tf.function(slopes, autograph=False)(x, ours), strict=True):
        np.testing.assert_allclose(found, theirs, rtol=1e-5, atol=1e-6)


def test_edits_are_made_again_at_the_end_of_the_outermost_context() -> None:
    with tf.Graph().as_default() as graph:
        one, other = (tf.compat.v1.placeholder(tf.float32, []) for _ in range(2))
        y = tf.sin(one)
        rewiring = Rewiring()
        rewiring.point(y.op, 0, other)
        original_view.remember(graph, rewiring)
        with original_view.as_built(graph):
            with original_view.as_built(graph):
                assert y.op.inputs[0] is one
            assert y.op.inputs[0] is one
        assert y.op.inputs[0] is other
