"""Identities that a compiler can neither remove nor look through.

XLA ignores control edges, merges equal ops, and fuses elementwise ops into all of their readers,
even if it then computes them several times. A tensor that must be computed twice, or not before
another op, or once for all of its readers, therefore passes through a conditional. The predicate is
false, which no compiler can prove. The branch for false returns the tensor, the other one returns
it reversed. (XLA would turn two elementwise branches into a selection, and fuse that again.) The
result equals the tensor to the last bit, whatever its dtype.

XLA pays with a copy of the tensor; TensorFlow's executor passes the buffer on.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import tensorflow as tf

from graph_tools.tf_private import graphs

__all__ = ["behind", "can_pass", "never"]


def never(trigger: tf.Tensor) -> tf.Tensor:
    """Return a boolean scalar that is always false, computed from one element of ``trigger``.

    It is true only if the square of the element's bits, divided by 4, leaves a remainder of 2: no
    square does.

    Parameters
    ----------
    trigger
        A tensor of any numeric or boolean dtype and any shape; may be empty, infinite or NaN.
    """
    element = tf.reshape(trigger, [-1])[:1]
    if trigger.dtype.is_complex:
        element = tf.math.real(element)
    if element.dtype.is_floating:
        bits = tf.bitcast(tf.cast(element, tf.float32), tf.int32)
    else:
        bits = tf.cast(element, tf.int32)
    bits = tf.reduce_max(bits)
    return tf.equal(tf.bitwise.bitwise_and(bits * bits, 3), 2)


def can_pass(tensor: tf.Tensor) -> bool:
    """Return whether `behind` works on tensors of this dtype."""
    dtype = tensor.dtype
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype == tf.bool)


def behind(tensor: tf.Tensor, predicate: tf.Tensor) -> tf.Tensor:
    """Return ``tensor``, available only after ``predicate`` (from `never`), and materialized once
    for all readers.

    Examples
    --------
    >>> import tensorflow as tf
    >>> @tf.function(jit_compile=True)
    ... def twice(x, late):
    ...     return tf.sin(x) + tf.sin(behind(x, never(late)))
    >>> twice(tf.zeros([2]), tf.ones([3])).numpy()
    array([0., 0.], dtype=float32)
    """
    shape = None if tensor.shape.rank is None else tuple(tensor.shape.as_list())
    turned, same = _branches(tensor.dtype, shape)
    return graphs.conditional(predicate, tensor, turned, same)


@lru_cache(maxsize=256)
def _branches(dtype: tf.DType, shape: tuple[int | None, ...] | None) -> tuple[Any, Any]:
    spec = tf.TensorSpec(shape, dtype)

    def turned(x: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tf.reverse(tf.reshape(x, [-1]), [0]), tf.shape(x))

    return tuple(
        tf.function(branch, autograph=False).get_concrete_function(spec)
        for branch in (turned, tf.identity)
    )
