"""The model of tests and benchmarks: variables, a loss of one batch, and one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Model:
    """A network that can be built into any graph.

    A builder makes the variables where it is called: eagerly (for a ``tf.function``), or inside the
    default ``tf.Graph`` (for a session). The latter works for plain TensorFlow models only, because
    Keras 3 makes its variables eagerly.  `loss` adds the forward ops to the current graph.

    Attributes
    ----------
    name
        Name of the builder, for tables.
    loss
        Takes one batch, as tensors, and returns the tensor to differentiate.
    variables
        Variables with respect to which the loss is differentiated.
    batch
        Arrays to feed: one batch, always the same.
    layers
        The ``keras.Model`` of the network, if there is one.
    """

    name: str
    loss: Callable[..., Any]
    variables: tuple[Any, ...]
    batch: tuple[Array, ...] = ()
    layers: Any = None


def keras_classifier(
    name: str, layers: Any, shape: tuple[int, ...], batch: int, classes: int, seed: int = 0
) -> Model:
    """Return a `Model` of Keras layers that return logits: softmax cross-entropy, a random batch.

    The loss includes the losses of layers (regularizers), as in ``fit``.
    """
    draw = np.random.default_rng(seed)
    images = draw.standard_normal((batch, *shape)).astype(np.float32)
    labels = draw.integers(0, classes, batch).astype(np.int32)

    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.add_n([entropy(layers(x, training=True), y), *layers.losses])

    return Model(name, loss, tensors(layers), (images, labels), layers)


def tensors(layers: Any) -> tuple[Any, ...]:
    """Return the ``tf.Variable`` of each trainable weight of a Keras model."""
    return tuple(weight.value for weight in layers.trainable_variables)


def entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Return the mean softmax cross-entropy of integer labels."""
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return tf.reduce_mean(each)


def normalized(x: tf.Tensor, gain: tf.Variable, bias: tf.Variable) -> tf.Tensor:
    """Return the layer normalization of the last axis."""
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-5) * gain + bias
