"""Convolutions and attention in turn, in plain TensorFlow ops, which are traced fast.

Each block has two convolutions with batch normalization and a shortcut, then attention over all
positions of the image, and a hidden layer. A layer normalization precedes each of the latter two.
No layer library is used: TensorFlow takes some 100 µs to trace an op.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.networks.base import Model, entropy, normalized


def mixed(
    blocks: int = 8,
    batch: int = 4,
    image: int = 8,
    width: int = 16,
    heads: int = 2,
    classes: int = 10,
) -> Model:
    """Make a classifier of images with `blocks` blocks and softmax cross-entropy."""
    draw = np.random.default_rng(0)
    variables: list[tf.Variable] = []
    positions = image * image

    def weight(*shape: int) -> tf.Variable:
        values = draw.standard_normal(shape) / np.sqrt(np.prod(shape[:-1]))
        variables.append(tf.Variable(values.astype(np.float32)))
        return variables[-1]

    def gain_and_bias() -> tuple[tf.Variable, tf.Variable]:
        pair = tf.Variable(np.ones(width, np.float32)), tf.Variable(np.zeros(width, np.float32))
        variables.extend(pair)
        return pair

    stem = weight(3, 3, 3, width)
    stack = [
        {
            "convolutions": [(weight(3, 3, width, width), *gain_and_bias()) for _ in range(2)],
            "norms": [gain_and_bias() for _ in range(2)],
            "projections": [weight(width, width) for _ in range(4)],
            "up": weight(width, 2 * width),
            "down": weight(2 * width, width),
        }
        for _ in range(blocks)
    ]
    output = weight(width, classes)

    def split(x: tf.Tensor) -> tf.Tensor:
        return tf.transpose(tf.reshape(x, [batch, positions, heads, width // heads]), [0, 2, 1, 3])

    def block(x: tf.Tensor, weights: dict[str, list[tf.Variable]]) -> tf.Tensor:
        x = tf.reshape(x + _convolved(x, weights["convolutions"]), [batch * positions, width])
        query, key, value, out = weights["projections"]
        y = normalized(x, *weights["norms"][0])
        scores = tf.matmul(split(y @ query), split(y @ key), transpose_b=True)
        read = tf.matmul(tf.nn.softmax(scores * (width // heads) ** -0.5), split(y @ value))
        x += tf.reshape(tf.transpose(read, [0, 2, 1, 3]), [batch * positions, width]) @ out
        y = normalized(x, *weights["norms"][1])
        x += tf.nn.gelu(y @ weights["up"]) @ weights["down"]
        return tf.reshape(x, [batch, image, image, width])

    def loss(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        x = tf.nn.conv2d(x, stem, strides=1, padding="SAME")
        for weights in stack:
            x = block(x, weights)
        logits = tf.reduce_mean(x, [1, 2]) @ output
        return entropy(logits, labels)

    images = draw.standard_normal((batch, image, image, 3)).astype(np.float32)
    labels = draw.integers(0, classes, batch).astype(np.int32)
    return Model("mixed", loss, tuple(variables), (images, labels))


def _convolved(x: tf.Tensor, layers: list[Any]) -> tf.Tensor:
    for filters, gain, bias in layers:
        x = tf.nn.conv2d(x, filters, strides=1, padding="SAME")
        x, _, _ = tf.compat.v1.nn.fused_batch_norm(x, gain, bias, is_training=True)
        x = tf.nn.relu(x)
    return x
