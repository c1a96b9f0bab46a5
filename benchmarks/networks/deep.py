"""The deep ResNets of Chen et al. 2016 (arXiv 1604.06174): planned, but never run.

A bottleneck unit has three convolutions, each followed by batch normalization and ReLU, and adds
the shortcut, as in the example published with the paper (dmlc/mxnet-memonger,
``example_resnet.py``). Its 66 units in stages of 3, 24, 36 and 3 are 200 layers ("we count a
conv-bn-relu as one layer"). The paper deepens every stage, here by the same factor. Convolutions
have no bias, because a bias before a normalization changes nothing.

Weights are placeholders, so that nothing is allocated: a thousand layers of ImageNet size take
seconds to build.
"""

from __future__ import annotations

import tensorflow as tf

from benchmarks.networks.base import entropy

#: Units of each stage at 200 layers.
STAGES = (3, 24, 36, 3)


def units_of(depth: int) -> tuple[int, ...]:
    """Return the units of each stage for about ``depth`` layers: two, plus three per unit.

    Examples
    --------
    >>> units_of(200), units_of(1001)
    ((3, 24, 36, 3), (15, 121, 182, 15))
    """
    factor = (depth - 2) / 3 / sum(STAGES)
    return tuple(max(1, round(units * factor)) for units in STAGES)


def deep_resnet(
    depth: int = 1001, batch: int = 32, *, image: int = 224, width: int = 64, classes: int = 1000
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Return loss and weights of a ResNet in the current graph, which must not be a function's."""
    weights: list[tf.Tensor] = []

    def weight(*shape: int) -> tf.Tensor:
        weights.append(tf.compat.v1.placeholder(tf.float32, shape))
        return weights[-1]

    def layer(x: tf.Tensor, channels: int, kernel: int, stride: int = 1) -> tf.Tensor:
        """Return convolution, batch normalization and ReLU of ``x``."""
        filters = weight(kernel, kernel, x.shape[-1], channels)
        y = tf.nn.conv2d(x, filters, strides=stride, padding="SAME")
        scale, offset = weight(channels), weight(channels)
        y, _, _ = tf.compat.v1.nn.fused_batch_norm(y, scale, offset, is_training=True)
        return tf.nn.relu(y)

    x = tf.compat.v1.placeholder(tf.float32, [batch, image, image, 3])
    labels = tf.compat.v1.placeholder(tf.int32, [batch])
    x = layer(x, width, 7, stride=2)
    x = tf.nn.max_pool2d(x, 3, strides=2, padding="SAME")
    for stage, units in enumerate(units_of(depth)):
        channels = width * 2**stage
        for unit in range(units):
            stride = 2 if stage and not unit else 1
            y = layer(x, channels, 1)
            y = layer(y, channels, 3, stride)
            y = layer(y, 4 * channels, 1)
            x = (x if unit else layer(x, 4 * channels, 1, stride)) + y
    x = tf.reduce_mean(x, axis=[1, 2])
    logits = tf.matmul(x, weight(x.shape[-1], classes)) + weight(classes)
    return entropy(logits, labels), weights
