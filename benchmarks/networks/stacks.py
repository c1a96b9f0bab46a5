"""Stacks of equal blocks of Keras layers: a Transformer encoder, and a chain of dense layers.

Layers have fixed names, so that code that takes such a model apart finds the same names in every
build.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.networks.base import Model, entropy, keras_classifier, tensors


def encoder(
    layers: int = 12,
    batch: int = 8,
    length: int = 128,
    width: int = 256,
    heads: int = 4,
    vocabulary: int = 1024,
    classes: int = 10,
    dropout: float = 0.1,
) -> Model:
    """Make a pre-norm encoder (Vaswani et al. 2017, arXiv 1706.03762) with a classifier.

    One fed mask hides the padding from all layers. Dropout is Keras' own: each layer counts its
    draws in a variable.
    """
    keras.utils.set_random_seed(0)
    tokens = keras.Input((length,), batch_size=batch, dtype="int32", name="tokens")
    mask = keras.Input((1, length), batch_size=batch, dtype="bool", name="mask")
    x = keras.layers.Embedding(vocabulary, width, name="embedding")(tokens)
    x = _Positions(name="positions")(x)
    for number in range(layers):
        x = _encoder_layer(x, mask, width, heads, dropout, f"layer{number}")
    x = keras.layers.LayerNormalization(name="final")(x)
    outputs = keras.layers.Dense(classes, name="logits")(x[:, 0])
    model = keras.Model((tokens, mask), outputs, name="encoder")
    draw = np.random.default_rng(0)
    ids = draw.integers(1, vocabulary, (batch, length)).astype(np.int32)
    lengths = draw.integers(length // 2, length + 1, (batch, 1, 1))
    allowed = np.arange(length)[None, None] < lengths
    labels = draw.integers(0, classes, batch).astype(np.int32)

    def loss(ids: tf.Tensor, allowed: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return entropy(model((ids, allowed), training=True), labels)

    return Model("encoder", loss, tensors(model), (ids, allowed, labels), model)


def dense_chain(depth: int = 64, batch: int = 1024, width: int = 512, classes: int = 10) -> Model:
    """Make `depth` dense layers of equal width with tanh, and a classifier after them."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((width,), batch_size=batch)
    x: Any = inputs
    for number in range(depth):
        x = keras.layers.Dense(width, activation="tanh", name=f"dense{number}")(x)
    model = keras.Model(inputs, keras.layers.Dense(classes, name="logits")(x), name="dense_chain")
    return keras_classifier("dense_chain", model, (width,), batch, classes)


class _Positions(keras.layers.Layer):
    """A layer that adds a trained vector to each position."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.vectors = self.add_weight(shape=shape[1:], name="vectors")

    def call(self, x: Any) -> Any:
        return x + self.vectors


def _encoder_layer(x: Any, mask: Any, width: int, heads: int, dropout: float, name: str) -> Any:
    y = keras.layers.LayerNormalization(name=f"{name}_norm1")(x)
    y = keras.layers.MultiHeadAttention(
        heads, width // heads, dropout=dropout, seed=1, name=f"{name}_attention"
    )(y, y, attention_mask=mask)
    y = keras.layers.Dropout(dropout, seed=2, name=f"{name}_drop1")(y)
    x = keras.layers.Add(name=f"{name}_add1")([x, y])
    y = keras.layers.LayerNormalization(name=f"{name}_norm2")(x)
    y = keras.layers.Dense(4 * width, activation="gelu", name=f"{name}_up")(y)
    y = keras.layers.Dense(width, name=f"{name}_down")(y)
    y = keras.layers.Dropout(dropout, seed=3, name=f"{name}_drop2")(y)
    return keras.layers.Add(name=f"{name}_out")([x, y])
