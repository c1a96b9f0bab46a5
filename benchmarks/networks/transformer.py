"""A pre-norm Transformer language model in plain TensorFlow ops, with what trips up planners.

Each variant adds one thing that joins distant parts of the graph: an attention mask is read by
every layer, a tied embedding by both ends, weight decay squares every variable beside the network,
and a loss outside any name scope has none of the names that a planner could match.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from benchmarks.networks.base import Model

__all__ = ["transformer"]


def transformer(
    layers: int = 12,
    batch: int = 4,
    length: int = 64,
    width: int = 64,
    heads: int = 4,
    vocabulary: int = 64,
    *,
    mask: bool = False,
    tied: bool = False,
    dropout: float = 0.0,
    rectified: bool = False,
    stateless: bool = False,
    decay: float = 0.0,
    loss_scope: str | None = "xentropy",
    resource: bool = True,
    named: bool = False,
) -> Model:
    """A Transformer that predicts token ids.

    Parameters
    ----------
    layers, batch, length, width, heads, vocabulary
        Sizes. The hidden layer is four times as wide as `width`.
    mask
        Attend backwards only, by one additive mask, made from a fed bool array, for all layers.
    tied
        Use the embedding as the output matrix as well.
    dropout
        Rate, after attention weights, attention output and hidden layer's output.
    rectified
        ReLU instead of SiLU in the hidden layer, with dropout behind it, too (``relu_dropout`` of tensor2tensor).
    stateless
        Draw the dropout masks with stateless ops and fixed seeds.
    decay
        Weight of the sum of squares of all matrices, written out by hand.
    loss_scope
        Name scope of the loss; ``None`` for no scope.
    resource
        Make resource variables; ``False`` makes reference variables (in a ``tf.Graph`` only).
    named
        Give names to the input of the first layer and the output of each: ``block0``, ``block1``, …
    """
    weights = _Weights(resource)
    embedding = weights.matrix("embedding", vocabulary, width)
    positions = weights.matrix("positions", length, width)
    stack = [_layer_weights(weights, f"layer{i}", width) for i in range(layers)]
    final = weights.norm("final", width)
    output = embedding if tied else weights.matrix("output", vocabulary, width)

    draw = np.random.default_rng(1)
    tokens = draw.integers(0, vocabulary, (batch, length)).astype(np.int32)
    targets = draw.integers(0, vocabulary, (batch, length)).astype(np.int32)
    fed: tuple[np.ndarray, ...] = (tokens, targets)
    if mask:
        fed += (np.tril(np.ones((length, length), bool))[None, None].repeat(batch, 0),)

    def drop(x: tf.Tensor, seed: int) -> tf.Tensor:
        if not dropout:
            return x
        if stateless:
            return tf.nn.experimental.stateless_dropout(x, dropout, seed=[seed, 7])
        return tf.nn.dropout(x, dropout)

    def attention(
        x: tf.Tensor, w: dict[str, tf.Variable], bias: tf.Tensor | None, seed: int
    ) -> tf.Tensor:
        def split(t: tf.Tensor) -> tf.Tensor:
            return tf.transpose(tf.reshape(t, [batch, length, heads, width // heads]), [0, 2, 1, 3])

        flat = tf.reshape(x, [batch * length, width])
        query, key, value = (split(tf.matmul(flat, w[name])) for name in ("q", "k", "v"))
        scores = tf.matmul(query, key, transpose_b=True) * (width // heads) ** -0.5
        if bias is not None:
            scores = scores + bias
        mixed = tf.matmul(drop(tf.nn.softmax(scores), seed), value)
        mixed = tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [batch * length, width])
        return drop(tf.reshape(tf.matmul(mixed, w["o"]), [batch, length, width]), seed + 1)

    def feed_forward(x: tf.Tensor, w: dict[str, tf.Variable], seed: int) -> tf.Tensor:
        hidden = tf.matmul(tf.reshape(x, [batch * length, width]), w["up"]) + w["up_bias"]
        active = drop(tf.nn.relu(hidden), 3 * layers + seed) if rectified else tf.nn.silu(hidden)
        out = tf.matmul(active, w["down"]) + w["down_bias"]
        return drop(tf.reshape(out, [batch, length, width]), seed)

    def loss(ids: tf.Tensor, labels: tf.Tensor, allowed: tf.Tensor | None = None) -> tf.Tensor:
        bias = None if allowed is None else (1.0 - tf.cast(allowed, tf.float32)) * -1e9
        x = tf.gather(embedding, ids) + positions
        if named:
            x = tf.identity(x, name="block0")
        for i, w in enumerate(stack):
            x = x + attention(_normalize(x, w["norm1"], w["norm1_bias"]), w, bias, 3 * i)
            x = x + feed_forward(_normalize(x, w["norm2"], w["norm2_bias"]), w, 3 * i + 2)
            if named:
                x = tf.identity(x, name=f"block{i + 1}")
        x = tf.reshape(_normalize(x, *final), [batch * length, width])
        logits = tf.matmul(x, output, transpose_b=True)
        with contextlib.nullcontext() if loss_scope is None else tf.name_scope(loss_scope):
            entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels=tf.reshape(labels, [-1]), logits=logits
            )
            total = tf.reduce_mean(entropy)
            if decay:
                matrices = [w for w in weights.all if len(w.shape) == 2]
                total += decay * tf.add_n([tf.reduce_sum(tf.square(w)) for w in matrices])
        return total

    return Model("transformer", loss, tuple(weights.all), fed)


def _normalize(x: tf.Tensor, gain: tf.Variable, bias: tf.Variable) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-5) * gain + bias


def _layer_weights(weights: _Weights, name: str, width: int) -> dict[str, tf.Variable]:
    w: dict[str, tf.Variable] = {}
    for i in "12":
        w[f"norm{i}"], w[f"norm{i}_bias"] = weights.norm(f"{name}/norm{i}", width)
    for key in "qkvo":
        w[key] = weights.matrix(f"{name}/{key}", width, width)
    w["up"] = weights.matrix(f"{name}/up", width, 4 * width)
    w["up_bias"] = weights.vector(f"{name}/up_bias", 4 * width, 0.0)
    w["down"] = weights.matrix(f"{name}/down", 4 * width, width)
    w["down_bias"] = weights.vector(f"{name}/down_bias", width, 0.0)
    return w


class _Weights:
    """Makes variables in order, the same ones every time."""

    def __init__(self, resource: bool) -> None:
        self.all: list[tf.Variable] = []
        self._resource = resource
        self._draw = np.random.default_rng(0)

    def matrix(self, name: str, rows: int, columns: int) -> tf.Variable:
        values = self._draw.standard_normal((rows, columns)) / np.sqrt(rows)
        return self._add(name, values.astype(np.float32))

    def vector(self, name: str, size: int, value: float) -> tf.Variable:
        return self._add(name, np.full([size], value, np.float32))

    def norm(self, name: str, width: int) -> Sequence[tf.Variable]:
        return (
            self.vector(f"{name}/gain", width, 1.0),
            self.vector(f"{name}/bias", width, 0.0),
        )

    def _add(self, name: str, values: np.ndarray) -> tf.Variable:
        if self._resource:
            variable = tf.Variable(values, name=name)
        else:
            variable = tf.compat.v1.Variable(values, name=name, use_resource=False)
        self.all.append(variable)
        return variable
