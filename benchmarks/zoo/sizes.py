"""Rules for sizes: activations, not gradients, should decide the peak, at the least work.

No plan avoids the gradient of the largest variable, and the step computes its square as well. The
batch is doubled, within limits, until the outputs of all layers take several times as many bytes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.networks.base import Array, Model

BATCHES = (8, 16, 32)
#: The least ratio of the outputs of all layers to the largest variable.
ENOUGH = 8


def batch_for(model: Any) -> int:
    """Return the least of `BATCHES` at which a built Keras model (2 or 3) has `ENOUGH` outputs."""
    outputs = 0
    for layer in model.layers:
        shapes = getattr(layer, "output", None)
        for tensor in shapes if isinstance(shapes, list | tuple) else [shapes]:
            if tensor is not None:
                outputs += math.prod(n or 1 for n in tensor.shape[1:])
    largest = max(math.prod(weight.shape) for weight in model.trainable_weights)
    for batch in BATCHES[:-1]:
        if batch * outputs >= ENOUGH * largest:
            return batch
    return BATCHES[-1]


def draw_images(shape: tuple[int, ...], seed: int = 0) -> Array:
    """Return normally distributed numbers, the same in every process."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def draw_tokens(shape: tuple[int, ...], vocabulary: int, seed: int = 0) -> Array:
    """Return numbers of words; none is 0, which some models take for padding."""
    return np.random.default_rng(seed).integers(1, vocabulary, shape).astype(np.int32)


def cross_entropy(labels: Any, logits: Any) -> Any:
    """Return the mean cross-entropy, by the same ops with and without op determinism."""
    chosen = tf.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return -tf.reduce_mean(tf.reduce_sum(chosen * tf.nn.log_softmax(logits), axis=-1))


def square_error(outputs: Any) -> Any:
    """Return the sum over floating outputs of their mean square, a loss for features."""
    means = [
        tf.reduce_mean(tf.square(tf.cast(output, tf.float32)))
        for output in tf.nest.flatten(outputs)
        if tf.as_dtype(output.dtype).is_floating
    ]
    return tf.add_n(means)


def classifier(name: str, layers: Any, inputs: list[Array], classes: int) -> Model:
    """Return a `Model` of Keras layers (2 or 3) that return logits, with softmax cross-entropy."""
    labels = np.random.default_rng(1).integers(0, classes, len(inputs[0])).astype(np.int32)

    def loss(*batch: tf.Tensor) -> tf.Tensor:
        *x, y = batch
        logits = layers(x if len(x) > 1 else x[0], training=True)
        return tf.add_n([cross_entropy(y, logits), *layers.losses])

    # In Keras 2, a weight is the variable itself.
    weights = layers.trainable_variables
    variables = (w if isinstance(w, tf.Variable) else w.value for w in weights)
    return Model(name, loss, tuple(variables), (*inputs, labels), layers)
