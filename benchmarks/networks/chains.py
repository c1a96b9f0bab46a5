"""Networks without a layer library: chains of equal elementwise ops, and a multi-layer perceptron.

All tensors of a chain have the same size, so a peak is a whole number of tensors and can be
compared with the theory: a chain of n needs about sqrt(2 n) if each value is recomputed at most
once. The size is a power of two: for others, TensorFlow's allocator hands out larger chunks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from benchmarks.networks.base import Model


def tanh_chain(length: int = 100, size: int = 2**18) -> Model:
    """Make ``tanh`` applied `length` times to a variable of `size` floats, all of them the loss."""
    return _chain("tanh_chain", tf.tanh, length, size)


def residual_chain(length: int = 100, size: int = 2**18) -> Model:
    """Make ``a + tanh(a)`` applied `length` times to a variable of `size` floats."""
    return _chain("residual_chain", lambda value: value + tf.tanh(value), length, size)


def _chain(name: str, link: Callable[[tf.Tensor], tf.Tensor], length: int, size: int) -> Model:
    start = tf.Variable(np.linspace(-1.0, 1.0, size, dtype=np.float32), name="a0")

    def loss() -> tf.Tensor:
        value = tf.convert_to_tensor(start)
        for _ in range(length):
            value = link(value)
        return value

    return Model(name, loss, (start,))


def mlp(depth: int = 64, batch: int = 2048, width: int = 512) -> Model:
    """Make `depth` times matmul, tanh, sine on `batch` x `width`, then the mean of squares."""
    draw = np.random.default_rng(0)
    weights = tuple(
        tf.Variable(
            (draw.standard_normal((width, width)) / np.sqrt(width)).astype(np.float32), name=f"w{i}"
        )
        for i in range(depth)
    )
    inputs = draw.standard_normal((batch, width)).astype(np.float32)

    def loss(x: tf.Tensor) -> tf.Tensor:
        for weight in weights:
            x = tf.sin(tf.tanh(x @ weight))
        return tf.reduce_mean(tf.square(x))

    return Model("mlp", loss, weights, (inputs,))
