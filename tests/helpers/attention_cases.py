"""Attention by its formula, and helpers of the tests of attention in blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.helpers.support import numbers


def dot_product(query, key, value, mask=None, bias=None, causal=False, scale=None, kept=None):
    """Attention with all scores at once; ``kept``: mask of the kept weights, and dropout rate."""
    scores = tf.einsum("...qd,...kd->...qk", query, key)
    scores *= query.shape[-1] ** -0.5 if scale is None else scale
    if bias is not None:
        scores += bias
    seen = tf.ones_like(scores, tf.bool)
    if causal:
        seen = tf.linalg.band_part(seen, -1, 0)
    if mask is not None:
        seen = tf.logical_and(seen, mask)
    weights = tf.nn.softmax(tf.where(seen, scores, tf.cast(scores.dtype.min / 2, scores.dtype)))
    if kept is not None:
        mask, rate = kept
        weights = tf.where(mask, weights / (1 - rate), 0)
    return tf.matmul(weights, value)


def additive(query, value, key=None, scale=None, mask=None):
    """Additive attention with all sums at once."""
    key = value if key is None else key
    sums = tf.tanh(query[:, :, tf.newaxis] + key[:, tf.newaxis])
    scores = tf.reduce_sum(sums if scale is None else scale * sums, -1)
    if mask is not None:
        scores = tf.where(mask, scores, scores.dtype.min / 2)
    return tf.matmul(tf.nn.softmax(scores), value)


def tensors(*shapes: Sequence[int], dtype: tf.DType = tf.float32) -> list[tf.Tensor]:
    """Normally distributed numbers, different for each shape and position."""
    return [tf.cast(numbers(f"{i}", *shape), dtype) for i, shape in enumerate(shapes)]


def eagerly(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    """In place of ``tf.function``: leave the function as it is."""
    return function


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """In place of ``tf.function``: compile the function by XLA."""
    return tf.function(function, jit_compile=True, **options)


def first_order(function: Callable[..., Any], inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The output and the gradients for all inputs of a weighted sum of it."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        output = function(*inputs)
        loss = tf.reduce_sum(output * tf.cast(numbers("loss", *output.shape), output.dtype))
    return [output, *tape.gradient(loss, inputs)]


def second_order(function: Callable[..., Any], inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The gradients, for all inputs, of a weighted sum of gradients."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        _, *gradients = first_order(function, inputs)
        directions = [numbers(f"to {i}", *g.shape) for i, g in enumerate(gradients)]
        loss = tf.add_n([tf.reduce_sum(g * d) for g, d in zip(gradients, directions, strict=True)])
    return tape.gradient(loss, inputs, unconnected_gradients="zero")


def assert_close(found: Any, expected: Any, tolerance: float = 1e-5, *, least: float = 1.0) -> None:
    """Assert that results differ by at most ``tolerance`` times the largest number or ``least``."""
    found, expected = tf.nest.flatten(found), tf.nest.flatten(expected)
    for place, (a, b) in enumerate(zip(found, expected, strict=True)):
        a, b = (np.asarray(tf.cast(x, tf.float64)) for x in (a, b))
        assert a.shape == b.shape, f"result {place}"
        most = max(least, float(np.max(np.abs(b), initial=0)))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * most, err_msg=f"result {place}")
