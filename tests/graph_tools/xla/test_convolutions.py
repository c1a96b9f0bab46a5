"""Gradients of convolutions in the form for branches, compared with TensorFlow's own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from graph_tools.xla import convolutions

_EXPLICIT = [[0, 0], [2, 1], [1, 2], [0, 0]]
_CASES = [
    (size, width, stride, dilation, padding)
    for size, width, stride, dilation, padding in itertools.product(
        (9, 10), (1, 3), (1, 2, 3), (1, 2), ("SAME", "VALID", _EXPLICIT)
    )
    if stride == 1 or dilation == 1
]


def _numbers(*shape):
    draw = np.random.default_rng(len(shape))
    return tf.constant(draw.standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize(("size", "width", "stride", "dilation", "padding"), _CASES[::3])
def test_gradients_are_those_of_tensorflow(size, width, stride, dilation, padding):
    x, w = _numbers(2, size, size, 3), _numbers(width, width, 3, 5)

    @tf.function(jit_compile=True, autograph=False)
    def both(x, w):
        y = tf.nn.conv2d(x, w, stride, padding, dilations=dilation)
        grads = tf.gradients(tf.reduce_sum(y * y), [x, w])
        return grads, [convolutions.fast_copy(g.op, list(g.op.inputs)) for g in grads]

    for theirs, ours in zip(*both(x, w), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("multiplier", [1, 2])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_depthwise_filters(stride, multiplier, padding):
    x, w = _numbers(2, 10, 10, 3), _numbers(3, 3, 3, multiplier)

    @tf.function(jit_compile=True, autograph=False)
    def both(x, w):
        y = tf.nn.depthwise_conv2d(x, w, [1, stride, stride, 1], padding)
        (grad,) = tf.gradients(tf.reduce_sum(y * y), [w])
        return grad, convolutions.fast_copy(grad.op, list(grad.op.inputs))

    theirs, ours = both(x, w)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


def test_three_dimensions():
    x, w = _numbers(2, 5, 6, 7, 3), _numbers(2, 3, 3, 3, 4)

    @tf.function(jit_compile=True, autograph=False)
    def both(x, w):
        y = tf.nn.conv3d(x, w, [1, 1, 2, 1, 1], "SAME")
        grads = tf.gradients(tf.reduce_sum(y * y), [x, w])
        assert not any(convolutions.is_slow(g.op) for g in grads)
        return grads, [convolutions.fast_copy(g.op, list(g.op.inputs)) for g in grads]

    for theirs, ours in zip(*both(x, w), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


def test_unknown_sizes_and_groups_are_left_alone():
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, None, 8, 4])
        w = tf.constant(0.5, shape=[3, 3, 4, 4])
        grouped = tf.constant(0.5, shape=[3, 3, 2, 4])
        unknown = tf.gradients(tf.nn.conv2d(x, w, 1, "SAME"), x)[0].op
        x = tf.compat.v1.placeholder(tf.float32, [None, 8, 8, 4])
        groups = tf.gradients(tf.nn.conv2d(x, grouped, 1, "SAME"), x)[0].op
    for op in (unknown, groups):
        assert convolutions.is_slow(op)
        assert convolutions.fast_copy(op, list(op.inputs)) is None
