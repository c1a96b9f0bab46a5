"""A pre-norm Transformer language model in plain TensorFlow ops, with variants that trip planners.

Most variants join distant parts of the graph: every layer reads an attention mask, both ends read a
tied embedding, weight decay squares every variable outside the network. And a loss outside any name
scope has none of the names that a planner could match.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.networks.base import Model, entropy, normalized


def transformer(layers: int = 12, **options: Any) -> Model:
    """Make a Transformer that predicts token ids; options are the attributes of `Transformer`."""
    return Transformer(layers, **options).model()


@dataclass(frozen=True)
class Transformer:
    """The sizes of a Transformer and its variants.

    Attributes
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
        ReLU instead of SiLU in the hidden layer, with another dropout after it (``relu_dropout`` of
        tensor2tensor).
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

    layers: int = 12
    batch: int = 4
    length: int = 64
    width: int = 64
    heads: int = 4
    vocabulary: int = 64
    mask: bool = False
    tied: bool = False
    dropout: float = 0.0
    rectified: bool = False
    stateless: bool = False
    decay: float = 0.0
    loss_scope: str | None = "xentropy"
    resource: bool = True
    named: bool = False

    def model(self) -> Model:
        """Make the variables and one batch."""
        weights = _Weights(self.resource)
        embedding = weights.matrix("embedding", self.vocabulary, self.width)
        positions = weights.matrix("positions", self.length, self.width)
        stack = [_layer_weights(weights, f"layer{i}", self.width) for i in range(self.layers)]
        final = weights.norm("final", self.width)
        tied = self.tied
        output = embedding if tied else weights.matrix("output", self.vocabulary, self.width)

        def loss(ids: tf.Tensor, labels: tf.Tensor, allowed: tf.Tensor | None = None) -> tf.Tensor:
            bias = None if allowed is None else (1.0 - tf.cast(allowed, tf.float32)) * -1e9
            x = self.named_block(tf.gather(embedding, ids) + positions, 0)
            for i, w in enumerate(stack):
                y = normalized(x, w["norm1"], w["norm1_bias"])
                x = x + self.attention(y, w, bias, 3 * i)
                y = normalized(x, w["norm2"], w["norm2_bias"])
                x = x + self.feed_forward(y, w, 3 * i + 2)
                x = self.named_block(x, i + 1)
            x = tf.reshape(normalized(x, *final), [self.batch * self.length, self.width])
            logits = tf.matmul(x, output, transpose_b=True)
            scope = self.loss_scope
            with contextlib.nullcontext() if scope is None else tf.name_scope(scope):
                total = entropy(logits, tf.reshape(labels, [-1]))
                if self.decay:
                    matrices = [w for w in weights.all if len(w.shape) == 2]
                    total += self.decay * tf.add_n([tf.reduce_sum(tf.square(w)) for w in matrices])
            return total

        return Model("transformer", loss, tuple(weights.all), self.fed())

    def fed(self) -> tuple[np.ndarray, ...]:
        """Return one batch: tokens, targets, and the mask if there is one."""
        draw = np.random.default_rng(1)
        shape = (self.batch, self.length)
        tokens = draw.integers(0, self.vocabulary, shape).astype(np.int32)
        targets = draw.integers(0, self.vocabulary, shape).astype(np.int32)
        if not self.mask:
            return tokens, targets
        below = np.tril(np.ones((self.length, self.length), bool))[None, None]
        return tokens, targets, below.repeat(self.batch, 0)

    def named_block(self, x: tf.Tensor, number: int) -> tf.Tensor:
        """Return the output of a block, with a name of its own if blocks have names."""
        return tf.identity(x, name=f"block{number}") if self.named else x

    def drop(self, x: tf.Tensor, seed: int) -> tf.Tensor:
        """Return ``x`` after dropout."""
        if not self.dropout:
            return x
        if self.stateless:
            return tf.nn.experimental.stateless_dropout(x, self.dropout, seed=[seed, 7])
        return tf.nn.dropout(x, self.dropout)

    def attention(
        self, x: tf.Tensor, w: dict[str, tf.Variable], bias: tf.Tensor | None, seed: int
    ) -> tf.Tensor:
        """Return the attention of all heads."""
        batch, length, width = self.batch, self.length, self.width
        each = width // self.heads

        def split(t: tf.Tensor) -> tf.Tensor:
            return tf.transpose(tf.reshape(t, [batch, length, self.heads, each]), [0, 2, 1, 3])

        flat = tf.reshape(x, [batch * length, width])
        query, key, value = (split(tf.matmul(flat, w[name])) for name in ("q", "k", "v"))
        scores = tf.matmul(query, key, transpose_b=True) * each**-0.5
        if bias is not None:
            scores = scores + bias
        mixed = tf.matmul(self.drop(tf.nn.softmax(scores), seed), value)
        mixed = tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [batch * length, width])
        return self.drop(tf.reshape(tf.matmul(mixed, w["o"]), [batch, length, width]), seed + 1)

    def feed_forward(self, x: tf.Tensor, w: dict[str, tf.Variable], seed: int) -> tf.Tensor:
        """Return the hidden layer's output."""
        batch, length, width = self.batch, self.length, self.width
        hidden = tf.matmul(tf.reshape(x, [batch * length, width]), w["up"]) + w["up_bias"]
        if self.rectified:
            active = self.drop(tf.nn.relu(hidden), 3 * self.layers + seed)
        else:
            active = tf.nn.silu(hidden)
        out = tf.matmul(active, w["down"]) + w["down_bias"]
        return self.drop(tf.reshape(out, [batch, length, width]), seed)


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
    """A maker of variables: the same calls make the same values every time."""

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
        return (self.vector(f"{name}/gain", width, 1.0), self.vector(f"{name}/bias", width, 0.0))

    def _add(self, name: str, values: np.ndarray) -> tf.Variable:
        if self._resource:
            variable = tf.Variable(values, name=name)
        else:
            variable = tf.compat.v1.Variable(values, name=name, use_resource=False)
        self.all.append(variable)
        return variable
