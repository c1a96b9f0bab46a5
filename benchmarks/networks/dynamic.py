"""A Transformer with dynamic convolutions (Wu et al. 2019, arXiv 1901.10430), as for IWSLT'14.

A dynamic convolution averages a few neighbors of each word, by weights that the word itself
predicts: one set for each group of channels, made positive by a softmax. Seven encoder and six
decoder layers have width 512, windows of 3 to 31 words, four groups and inner layers of 1,024. A
normalization follows each residual sum. Decoder layers attend to the encoder. Source, target and
output share one table of embeddings.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.networks.base import Model, tensors
from benchmarks.networks.wide import policy_of_normalizations

ENCODER, DECODER = (3, 7, 15, 31, 31, 31, 31), (3, 7, 15, 31, 31, 31)


def dynamic_conv(
    batch: int = 128,
    length: int = 32,
    *,
    encoder: tuple[int, ...] = ENCODER,
    decoder: tuple[int, ...] = DECODER,
    width: int = 512,
    inner: int = 1024,
    heads: int = 4,
    words: int = 10_000,
    seed: int = 0,
) -> Model:
    """Make a translator of `length` words, with a cross-entropy of smoothed labels."""
    keras.utils.set_random_seed(seed)
    layers = translator(length, encoder, decoder, width, inner, heads, words)
    draw = np.random.default_rng(0)
    source, target, labels = draw.integers(1, words, (3, batch, length)).astype(np.int32)

    def loss(source: tf.Tensor, target: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return loss_of_words(labels, layers([source, target], training=True))

    return Model("dynamic_conv", loss, tensors(layers), (source, target, labels), layers)


def loss_of_words(labels: tf.Tensor, logits: tf.Tensor, smoothing: float = 0.1) -> tf.Tensor:
    """Return the mean cross-entropy of sentences, with labels smoothed over all words."""
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=labels, logits=tf.cast(logits, tf.float32)
    )
    # The cross-entropy of the uniform distribution: log-sum-exp minus the mean of all logits.
    flat = tf.cast(tf.reduce_mean(logits, axis=-1), tf.float32)
    norm = tf.cast(tf.reduce_logsumexp(logits, axis=-1), tf.float32)
    return tf.reduce_mean((1 - smoothing) * each + smoothing * (norm - flat))


def translator(
    length: int,
    encoder: tuple[int, ...] = ENCODER,
    decoder: tuple[int, ...] = DECODER,
    width: int = 512,
    inner: int = 1024,
    heads: int = 4,
    words: int = 10_000,
    dropout: float = 0.3,
    weight_dropout: float = 0.1,
) -> Any:
    """Make the network, which maps a sentence and the words so far to logits of the next words."""
    build = _Builder(width, inner, heads, dropout, weight_dropout)
    table = keras.layers.ReversibleEmbedding(
        words,
        width,
        embeddings_initializer=keras.initializers.RandomNormal(stddev=width**-0.5),
        name="words",
    )
    source = keras.Input([length], dtype="int32", name="source")
    target = keras.Input([length], dtype="int32", name="target")
    x = build.placed(table(source), "source")
    for number, window in enumerate(encoder):
        name = f"encoder{number + 1}"
        x = build.added(x, build.convolution(x, window, name, causal=False), f"{name}_conv")
        x = build.added(x, build.feed_forward(x, name), f"{name}_feed")
    y = build.placed(table(target), "target")
    for number, window in enumerate(decoder):
        name = f"decoder{number + 1}"
        y = build.added(y, build.convolution(y, window, name, causal=True), f"{name}_conv")
        y = build.added(y, build.attention(y, x, name), f"{name}_attend")
        y = build.added(y, build.feed_forward(y, name), f"{name}_feed")
    return keras.Model([source, target], table(y, reverse=True), name="dynamic_conv")


class _Builder:
    """A builder of the parts of a layer."""

    def __init__(
        self, width: int, inner: int, heads: int, dropout: float, weight_dropout: float
    ) -> None:
        self.width, self.inner, self.heads = width, inner, heads
        self.dropout, self.weight_dropout = dropout, weight_dropout

    def dense(self, x: Any, units: int, name: str, **options: Any) -> Any:
        return keras.layers.Dense(units, name=name, **options)(x)

    def placed(self, x: Any, name: str) -> Any:
        x = Positions(name=f"{name}_positions")(x)
        return keras.layers.Dropout(self.dropout, name=f"{name}_dropout")(x)

    def added(self, x: Any, new: Any, name: str) -> Any:
        new = keras.layers.Dropout(self.dropout, name=f"{name}_dropout")(new)
        x = keras.layers.Add(name=f"{name}_add")([x, new])
        return keras.layers.LayerNormalization(
            name=f"{name}_norm", epsilon=1e-5, dtype=policy_of_normalizations()
        )(x)

    def convolution(self, x: Any, window: int, name: str, *, causal: bool) -> Any:
        both = self.dense(x, 2 * self.width, f"{name}_in")
        x = Gated(name=f"{name}_gate")(both)
        weights = self.dense(x, self.heads * window, f"{name}_weights", use_bias=False)
        weights = keras.layers.Reshape((-1, self.heads, window), name=f"{name}_windows")(weights)
        weights = keras.layers.Softmax(name=f"{name}_softmax")(weights)
        weights = keras.layers.Dropout(self.weight_dropout, name=f"{name}_drop")(weights)
        x = DynamicConvolution(causal, name=f"{name}_convolve")([x, weights])
        return self.dense(x, self.width, f"{name}_out")

    def attention(self, y: Any, x: Any, name: str) -> Any:
        query, key, value = (
            self.dense(of, self.width, f"{name}_{part}")
            for of, part in ((y, "query"), (x, "key"), (x, "value"))
        )
        y = Attend(self.heads, name=f"{name}_heads")([query, key, value])
        return self.dense(y, self.width, f"{name}_attended")

    def feed_forward(self, x: Any, name: str) -> Any:
        x = self.dense(x, self.inner, f"{name}_inner", activation="relu")
        return self.dense(x, self.width, f"{name}_outer")


@keras.saving.register_keras_serializable(package="benchmarks")
class Positions(keras.layers.Layer):
    """A layer that scales embeddings, and adds sines and cosines of their positions."""

    def call(self, x: Any) -> Any:
        """Return the sum for ``x`` of shape (batch, length, width)."""
        length, width = x.shape[1:]
        rates = np.exp(np.arange(width // 2) * -(math.log(10_000) / (width // 2 - 1)))
        angles = np.arange(length)[:, None] * rates
        places = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
        return x * math.sqrt(width) + tf.constant(places, x.dtype)


@keras.saving.register_keras_serializable(package="benchmarks")
class Gated(keras.layers.Layer):
    """A layer: half of the channels times the sigmoid of the others (Dauphin et al. 2017)."""

    def call(self, both: Any) -> Any:
        """Return the product for ``both`` of shape (batch, length, 2 x width)."""
        x, gate = tf.split(both, 2, axis=-1)
        return x * tf.sigmoid(gate)


@keras.saving.register_keras_serializable(package="benchmarks")
class DynamicConvolution(keras.layers.Layer):
    """A layer that averages the words around each word, or if `causal` up to it, by weights."""

    def __init__(self, causal: bool, **options: Any) -> None:
        super().__init__(**options)
        self.causal = causal

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {**super().get_config(), "causal": self.causal}

    def call(self, inputs: Any) -> Any:
        """Return the averages for words of shape (batch, length, width) and weights of shape
        (batch, length, heads, window).
        """
        x, weights = inputs
        _, length, heads, window = weights.shape
        before = window - 1 if self.causal else window // 2
        # Row t of a band matrix has the weights of word t from column t on. To shift them, rows are
        # read one element shorter than they were written.
        rows = tf.transpose(weights, [0, 2, 1, 3])
        rows = tf.pad(rows, [[0, 0], [0, 0], [0, 0], [0, length]])
        flat = tf.reshape(rows, [-1, heads, length * (window + length)])[:, :, :-length]
        band = tf.reshape(flat, [-1, heads, length, window + length - 1])
        band = band[..., before : before + length]
        parts = tf.transpose(tf.reshape(x, [-1, length, heads, x.shape[-1] // heads]), [0, 2, 1, 3])
        return tf.reshape(tf.transpose(band @ parts, [0, 2, 1, 3]), tf.shape(x))


@keras.saving.register_keras_serializable(package="benchmarks")
class Attend(keras.layers.Layer):
    """A layer of multi-head attention."""

    def __init__(self, heads: int, **options: Any) -> None:
        super().__init__(**options)
        self.heads = heads

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {**super().get_config(), "heads": self.heads}

    def call(self, inputs: Any) -> Any:
        """Return the attention for queries, keys and values of shape (batch, length, width)."""
        query, key, value = (
            tf.transpose(
                tf.reshape(x, [-1, x.shape[1], self.heads, x.shape[-1] // self.heads]), [0, 2, 1, 3]
            )
            for x in inputs
        )
        scores = tf.matmul(query, key, transpose_b=True) / math.sqrt(query.shape[-1])
        found = tf.transpose(tf.nn.softmax(scores) @ value, [0, 2, 1, 3])
        return tf.reshape(found, tf.shape(inputs[0]))
