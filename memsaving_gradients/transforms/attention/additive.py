"""Additive attention without the sum of each query and each key.

The scores of additive attention (Bahdanau et al. 2014, arXiv 1409.0473) are ``Σ scale · tanh(query + key)``: a sum over
the width, of numbers of which there are ``queries × keys × width``. Plain training keeps them, and several more while it
computes: in a translation model with long sentences nearly all of its memory. They are cheap to make again from queries and
keys (Meng et al. 2017, "Training deeper models by GPU memory optimization on TensorFlow"), which makes the memory that of
``queries × keys`` scores. Meng et al. make them again as a whole; here it is done in blocks of queries and keys in both
passes, so that they are never there. One ``tanh`` more in the gradient pays for it.

With ``T = tanh(Q + K)`` and ``D = scale · (1 - T²)``, gradients for queries, keys and ``scale`` are sums of ``dS D``, ``dS D`` and ``dS T``
over keys, queries and both. The second order, in directions ``A, B, C`` of the three, is that of ``Σ dS (D (A + B) + C T)``:

    for dS: Σ D (A + B) + C T            for scale: Σ dS (1 - T²) (A + B)
    for Q + K: dS (1 - T²) (C - 2 scale T (A + B))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.transforms.attention.arguments import (
    block_pair,
    check_mask,
    check_rate,
    check_same,
    check_seed,
    floating,
)
from memsaving_gradients.transforms.attention.blocks import (
    Cut,
    Shelf,
    at_least,
    dims,
    loop,
    run,
    zero_like,
)
from memsaving_gradients.transforms.attention.custom_gradient import differentiable

__all__ = ["additive_attention", "additive_scores"]

#: Bytes of a block of sums.
BLOCK_BYTES = 4 * 2**20
NAME = "additive_attention"

Tensors = Sequence[tf.Tensor]


@tf.autograph.experimental.do_not_convert
def additive_attention(
    query: Any,
    value: Any,
    key: Any = None,
    scale: Any = None,
    *,
    mask: Any = None,
    dropout: float = 0.0,
    seed: Any = None,
    block: int | tuple[int, int] | None = None,
    return_scores: bool = False,
) -> Any:
    """``softmax(Σ scale · tanh(query + key)) value``, as `keras.layers.AdditiveAttention` computes it.

    Sums are made in blocks of queries and keys, forward and in the gradient; scores and weights, one for each query and
    key, are kept. Works in eager execution, in a ``tf.function`` with known or unknown lengths, and under XLA. The gradient for
    queries, keys, values and scale is exact; it can be differentiated once more.

    Parameters
    ----------
    query : Tensor [batch, queries, width]
        ``float16``, ``bfloat16``, ``float32`` or ``float64``.
    value : Tensor [batch, keys, any width]
        Of the dtype of ``query``.
    key : Tensor [batch, keys, width], optional
        ``value``, if not given.
    scale : Tensor [width], optional
        All ones, if not given.
    mask : Tensor of booleans, broadcastable to [batch, queries, keys], optional
        True where a query sees a key. A query that sees no key gets the mean of all values.
    dropout
        The part of weights that is set to zero, the others being scaled up.
    seed : Tensor [2] of integers
        What weights are dropped follows from it; needed with ``dropout``.
    block
        Queries and keys of a block, at most: one number or two. ``None``: as many as 4 MiB of sums hold.
    return_scores
        Whether the weights are returned as well, after dropout.

    Returns
    -------
    Tensor [batch, queries, width of values]
        With ``return_scores``, a pair of it and the weights, ``[batch, queries, keys]``.

    Raises
    ------
    ArgumentError
        An argument has a wrong dtype, shape or value.
    HigherOrderError
        Gradients of gradients of gradients are asked for.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from memsaving_gradients.transforms.attention import additive_attention
    >>> decoder = tf.random.stateless_normal([2, 30, 16], [1, 2])
    >>> encoder = tf.random.stateless_normal([2, 50, 16], [3, 4])
    >>> seen = tf.sequence_mask([50, 20])[:, tf.newaxis]
    >>> context, weights = additive_attention(decoder, encoder, mask=seen, return_scores=True)
    >>> context.shape, weights.shape
    (TensorShape([2, 30, 16]), TensorShape([2, 30, 50]))
    >>> float(tf.reduce_max(weights[1, :, 20:]))
    0.0
    """
    query = floating("query", query)
    value = floating("value", value, query.dtype)
    key = value if key is None else floating("key", key, query.dtype)
    if query.shape.rank != 3:
        raise ArgumentError(
            "query",
            query,
            f"has shape {query.shape}; it must read [batch, queries, width], so reshape it",
        )
    check_same("key", key, "query", query, [-2])
    check_same("value", value, "key", key, [-1])
    if scale is not None:
        scale = tf.convert_to_tensor(scale, query.dtype)
        if not scale.shape.is_compatible_with(query.shape[-1:]):
            raise ArgumentError(
                "scale",
                scale,
                f"has shape {scale.shape}; it must be one number for each of {query.shape[-1]}, the width of queries",
            )
    rate, size = check_rate(dropout, seed), block_pair(block)
    if mask is not None:
        mask = check_mask("mask", mask, [*query.shape.as_list()[:-1], key.shape.as_list()[-2]])
    scores = additive_scores(query, key, scale, size)
    if mask is not None:
        # A finite number: where no key is seen, all weights are equal.
        scores = tf.where(mask, scores, tf.constant(scores.dtype.min / 2, scores.dtype))
    weights = tf.nn.softmax(scores)
    if rate:
        weights = tf.nn.experimental.stateless_dropout(weights, rate, seed=check_seed(seed))
    result = tf.matmul(weights, value)
    return (result, weights) if return_scores else result


def additive_scores(
    query: tf.Tensor,
    key: tf.Tensor,
    scale: tf.Tensor | None = None,
    block: tuple[int, int] | None = None,
) -> tf.Tensor:
    """``Σ scale · tanh(query + key)``: ``[batch, queries, keys]``."""
    if scale is None:
        scale = tf.ones(dims(query)[-1:], query.dtype)

    def forwards(*inputs: tf.Tensor) -> Any:
        return run(_forward, block, inputs), ()

    def backwards(inputs: Any, scores: tf.Tensor, kept: Any, upstream: tf.Tensor) -> Any:
        return run(_backward, block, tuple(inputs), upstream)

    def twice(inputs: Any, scores: tf.Tensor, kept: Any, upstream: tf.Tensor, to: Any) -> Any:
        return run(_second, block, tuple(inputs), upstream, tuple(to))

    (scores,) = differentiable(NAME, forwards, backwards, twice, [query, key, scale])
    return scores


@dataclass(frozen=True)
class _Blocks:
    """Queries and keys ``[count, batch, size, width]``, in the dtype of sums; a scalar zero."""

    rows: Cut
    columns: Cut
    zero: tf.Tensor
    query: tf.Tensor
    key: tf.Tensor

    @staticmethod
    def of(block: tuple[int, int] | None, query: tf.Tensor, key: tf.Tensor) -> _Blocks:
        sums = tf.float64 if query.dtype == tf.float64 else tf.float32
        batch, queries, width = dims(query)
        if block is None:
            side = _side(BLOCK_BYTES // 4, batch, width)
            block = (side, side)
        rows, columns = Cut.of(queries, block[0]), Cut.of(dims(key)[-2], block[1])
        query, key = rows.split(tf.cast(query, sums), -2), columns.split(tf.cast(key, sums), -2)
        return _Blocks(rows, columns, zero_like(query, sums), query, key)

    def tanh(self, i: Any, j: Any) -> tf.Tensor:
        """``[batch, queries, keys, width]`` of a block."""
        return tf.tanh(self.query[i][:, :, tf.newaxis] + self.key[j][:, tf.newaxis])

    def pairs(self, x: tf.Tensor) -> tf.Tensor:
        """``[batch, queries, keys]`` in blocks ``[count, count, batch, size, size, 1]``."""
        x = self.rows.split(tf.cast(x, self.query.dtype), -2)
        x = self.columns.split(tf.linalg.matrix_transpose(x), -2)
        return tf.transpose(x, [1, 0, 2, 4, 3])[..., tf.newaxis]

    def joined(self, blocks: tf.Tensor) -> tf.Tensor:
        """The inverse, of what lies on the shelf ``of_pairs``."""
        rows, columns = self.rows, self.columns
        x = self.of_pairs.stacked(blocks)
        x = tf.reshape(x, [rows.count, columns.count, *dims(x)[1:-1]])
        x = tf.linalg.matrix_transpose(columns.join(tf.transpose(x, [1, 0, 2, 4, 3]), -2))
        return rows.join(x, -2)

    @property
    def of_pairs(self) -> Shelf:
        """For a number for each pair; see `place`."""
        rows, columns = self.rows, self.columns
        shape = [dims(self.query)[1], rows.size, columns.size, 1]
        return Shelf(rows.count * columns.count, shape, self.query.dtype)

    def place(self, i: Any, j: Any) -> Any:
        """Where a pair of blocks lies."""
        return i * self.columns.count + j

    @property
    def of_query(self) -> Shelf:
        """For sums over keys."""
        return Shelf.like(self.query, self.query.dtype)

    @property
    def of_key(self) -> Shelf:
        """For sums over queries."""
        return Shelf.like(self.key, self.key.dtype)

    def empty(self) -> list[tf.Tensor]:
        """For sums over pairs: of queries, of keys, of the width."""
        width = tf.fill(dims(self.query)[-1:], self.zero)
        return [self.of_query.empty(), self.of_key.empty(), width]

    def each(self, body: Any, carried: Sequence[tf.Tensor]) -> Any:
        """``carried = body(i, j, *carried)`` for all pairs of blocks."""

        def of_keys(j: Any, *values: tf.Tensor) -> Any:
            return loop(0, self.rows.count, lambda i, *values: body(i, j, *values), values)

        return loop(0, self.columns.count, of_keys, carried)


def _side(entries: int, batch: Any, width: Any) -> Any:
    """The side of square blocks of at most so many entries; positive."""
    if isinstance(batch, int) and isinstance(width, int):
        return max(1, math.isqrt(entries // max(1, batch * width)))
    root = tf.sqrt(tf.cast(entries, tf.float32) / tf.cast(at_least(batch * width, 1), tf.float32))
    return at_least(tf.cast(root, tf.int32), 1)


def _forward(block: Any, inputs: Tensors) -> tf.Tensor:
    query, key, scale = inputs
    b = _Blocks.of(block, query, key)
    scale = tf.cast(scale, b.query.dtype)[:, tf.newaxis]

    def body(i: Any, j: Any, scores: tf.Tensor) -> list[tf.Tensor]:
        return [b.of_pairs.put(scores, b.place(i, j), _times(b.tanh(i, j), scale))]

    (scores,) = b.each(body, [b.of_pairs.empty()])
    return tf.cast(b.joined(scores), query.dtype)


def _times(block: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """``block @ scale``, as one product of matrices."""
    shape = dims(block)
    return tf.reshape(tf.matmul(tf.reshape(block, [-1, shape[-1]]), scale), [*shape[:-1], 1])


def _backward(block: Any, inputs: Tensors, upstream: tf.Tensor) -> list[tf.Tensor]:
    query, key, scale = inputs
    b = _Blocks.of(block, query, key)
    slopes = b.pairs(upstream)
    # The factor `scale` is the same for all pairs, and applied to the sums.
    wide = tf.cast(scale, b.query.dtype)

    def body(i: Any, j: Any, dq: tf.Tensor, dk: tf.Tensor, ds: tf.Tensor) -> list[tf.Tensor]:
        tanh, slope = b.tanh(i, j), slopes[i, j]
        ds += _over_pairs(tanh, slope)
        part = slope * (1 - tf.square(tanh))
        return [
            b.of_query.add(dq, i, tf.reduce_sum(part, 2)),
            b.of_key.add(dk, j, tf.reduce_sum(part, 1)),
            ds,
        ]

    dq, dk, ds = b.each(body, b.empty())
    dq, dk = b.of_query.stacked(dq) * wide, b.of_key.stacked(dk) * wide
    found = [b.rows.join(dq, -2), b.columns.join(dk, -2), ds]
    return [tf.cast(d, x.dtype) for d, x in zip(found, inputs, strict=True)]


def _over_pairs(block: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """The weighted sum over all pairs, ``[width]``, as one product of matrices."""
    width = dims(block)[-1]
    sums = tf.matmul(tf.reshape(weights, [-1, 1]), tf.reshape(block, [-1, width]), transpose_a=True)
    return tf.reshape(sums, [width])


def _second(
    block: Any, inputs: Tensors, upstream: tf.Tensor, directions: Tensors
) -> list[tf.Tensor]:
    query, key, scale = inputs
    b, to = _Blocks.of(block, query, key), _Blocks.of(block, *directions[:2])
    slopes = b.pairs(upstream)
    sums = b.query.dtype
    wide, turned = tf.cast(scale, sums), tf.cast(directions[2], sums)

    def body(
        i: Any, j: Any, dq: tf.Tensor, dk: tf.Tensor, ds: tf.Tensor, du: tf.Tensor
    ) -> list[tf.Tensor]:
        tanh, slope = b.tanh(i, j), slopes[i, j]
        moved = to.query[i][:, :, tf.newaxis] + to.key[j][:, tf.newaxis]
        rise = 1 - tf.square(tanh)
        change = tf.reduce_sum(rise * moved * wide + turned * tanh, -1, keepdims=True)
        du = b.of_pairs.put(du, b.place(i, j), change)
        ds += _over_pairs(rise * moved, slope)
        part = slope * rise * (turned - 2 * wide * tanh * moved)
        dq = b.of_query.add(dq, i, tf.reduce_sum(part, 2))
        dk = b.of_key.add(dk, j, tf.reduce_sum(part, 1))
        return [dq, dk, ds, du]

    dq, dk, ds, du = b.each(body, [*b.empty(), b.of_pairs.empty()])
    dq, dk = b.of_query.stacked(dq), b.of_key.stacked(dk)
    found = [b.rows.join(dq, -2), b.columns.join(dk, -2), ds, b.joined(du)]
    return [tf.cast(d, x.dtype) for d, x in zip(found, [*inputs, upstream], strict=True)]
