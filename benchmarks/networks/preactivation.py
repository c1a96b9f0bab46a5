"""Pre-activation ResNets for ImageNet (He et al. 2016, arXiv 1603.05027).

The second version of TensorFlow's official ResNet has the same six depths, from 18 to 200 layers.
The gradient-checkpointing project measured it. A block has two convolutions up to 34 layers, and
a bottleneck of three from 50 on. The penalty on weights is written by hand, as there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.networks.base import Model, entropy

#: Blocks of each stage, by number of layers.
SIZES: dict[int, tuple[int, int, int, int]] = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}


def imagenet_resnet(
    size: int = 50,
    batch: int = 32,
    *,
    image: int = 224,
    width: int = 64,
    classes: int = 1001,
    decay: float = 2e-4,
) -> Model:
    """Make a ResNet of ``size`` layers, one of `SIZES`."""
    draw = np.random.default_rng(0)
    weights: list[tf.Variable] = []

    def convolution(kernel: int, inputs: int, outputs: int) -> tf.Variable:
        scale = (2 / (kernel * kernel * inputs)) ** 0.5
        values = scale * draw.standard_normal((kernel, kernel, inputs, outputs))
        weights.append(tf.Variable(values.astype(np.float32)))
        return weights[-1]

    def normalization(channels: int) -> tuple[tf.Variable, tf.Variable]:
        weights.extend((tf.Variable(tf.ones([channels])), tf.Variable(tf.zeros([channels]))))
        return weights[-2], weights[-1]

    stem = convolution(7, 3, width)
    blocks, channels = _blocks(size, width, convolution, normalization)
    last = normalization(channels)
    dense = tf.Variable(draw.standard_normal((channels, classes)).astype(np.float32) * 0.01)
    bias = tf.Variable(tf.zeros([classes]))
    weights.extend((dense, bias))

    def active(x: tf.Tensor, normalize: tuple[tf.Variable, tf.Variable]) -> tf.Tensor:
        return tf.nn.relu(tf.compat.v1.nn.fused_batch_norm(x, *normalize, is_training=True)[0])

    def loss(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        x = tf.nn.conv2d(x, stem, strides=2, padding="SAME")
        x = tf.nn.max_pool2d(x, 3, strides=2, padding="SAME")
        for layers, strides, shortcut in blocks:
            y, skipped = x, x
            for number, ((normalize, kernel), stride) in enumerate(
                zip(layers, strides, strict=True)
            ):
                y = active(y, normalize)
                if not number and shortcut is not None:
                    skipped = tf.nn.conv2d(y, shortcut, strides=max(strides), padding="SAME")
                y = tf.nn.conv2d(y, kernel, strides=stride, padding="SAME")
            x = skipped + y
        x = tf.reduce_mean(active(x, last), axis=[1, 2])
        logits = tf.matmul(x, dense) + bias
        return entropy(logits, labels) + decay * tf.add_n([tf.nn.l2_loss(w) for w in weights])

    images = draw.standard_normal((batch, image, image, 3)).astype(np.float32)
    labels = draw.integers(0, classes, batch).astype(np.int32)
    return Model("imagenet_resnet", loss, tuple(weights), (images, labels))


def _blocks(
    size: int, width: int, convolution: Callable[..., Any], normalization: Callable[..., Any]
) -> tuple[list[tuple[Any, list[int], Any]], int]:
    """Return weights, strides and shortcut of each block, and the channels of the last one."""
    bottleneck = size >= 50
    kernels = (1, 3, 1) if bottleneck else (3, 3)
    blocks: list[tuple[Any, list[int], Any]] = []
    channels = width
    for stage, many in enumerate(SIZES[size]):
        inner = width * 2**stage
        outer = 4 * inner if bottleneck else inner
        for number in range(many):
            widths = (inner, inner, outer) if bottleneck else (inner, inner)
            layers, inputs = [], channels
            for kernel, outputs in zip(kernels, widths, strict=True):
                layers.append((normalization(inputs), convolution(kernel, inputs, outputs)))
                inputs = outputs
            shortcut = None if number else convolution(1, channels, outer)
            # The first 3 x 3 convolution has the stride.
            strides = [1] * len(layers)
            strides[kernels.index(3)] = 2 if stage and not number else 1
            blocks.append((layers, strides, shortcut))
            channels = outer
    return blocks, channels
