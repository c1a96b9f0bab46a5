"""Additive attention that never holds the sums of all queries and keys.

The scores of additive attention (Bahdanau et al. 2014, arXiv 1409.0473) are ``Σ scale · tanh(query
+ key)``: a sum over the width, of ``queries × keys × width`` numbers. Plain training keeps them,
and holds several times as many while it computes: nearly all the memory of a translation model with
long sentences. They are cheap to recompute from queries and keys (Meng et al. 2017, "Training
deeper models by GPU memory optimization on TensorFlow"). Meng et al. recompute them as a whole;
here both passes compute them block by block. The cost is one more ``tanh`` in the gradient.

The softmax is a plain one over all scores. An online softmax would not hold them. But blocks of
sums are small, and it would multiply values by 16 × 16 matrices for 16 batches of width 256. With
it, a step with 100 queries and keys, and values of width 512, took 1.2 times the processor time.

With ``T = tanh(Q + K)`` and ``D = scale · (1 - T²)``, the gradient for queries is ``dS D`` summed
over keys; for keys, it is summed over queries. For ``scale`` it is ``Σ dS T`` over both. Scores
change by ``Σ D (A + B) + C T`` in directions ``A, B, C`` of the three. Its gradient ``dS'`` gives

    for Q + K: dS' (1 - T²) (C - 2 scale T (A + B))
    for scale: Σ dS' (1 - T²) (A + B)
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
    BLOCK_BYTES,
    maximum,
    shape_of,
    zero_like,
)
from memsaving_gradients.transforms.attention.custom_gradient import Passes, differentiable
from memsaving_gradients.transforms.attention.grid import Grid, Options
from memsaving_gradients.transforms.attention.pairs import BlockMatrix, Place, padded
from memsaving_gradients.transforms.attention.passes import over_columns
from memsaving_gradients.transforms.attention.scores import (
    Block,
    Pullback,
    ScoreBlock,
    ScoreTangent,
    TwiceDifferentiable,
)

__all__ = ["additive_attention", "additive_scores"]

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
    """Return ``softmax(Σ scale · tanh(query + key)) value``, as `keras.layers.AdditiveAttention`.

    Sums are computed in blocks of queries and keys, forward and in the gradient; scores and
    weights, one for each query and key, are kept. Works in eager execution, in a ``tf.function``
    with known or unknown lengths, and under XLA. The gradient for queries, keys, values and scale
    is exact; it can be differentiated once more.

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
        The share of weights that is set to zero; the others are scaled up.
    seed : Tensor [2] of integers
        Determines the dropped weights; needed with ``dropout``.
    block
        The most queries and keys of a block: one number or two. ``None``: as many as 4 MiB of sums
        hold.
    return_scores
        Whether to return the weights as well, after dropout.

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
            f"has shape {query.shape}; its axes must be [batch, queries, width], so reshape it",
        )
    check_same("key", key, "query", query, [-2])
    check_same("value", value, "key", key, [-1])
    if scale is not None:
        scale = tf.convert_to_tensor(scale, query.dtype)
        if not scale.shape.is_compatible_with(query.shape[-1:]):
            raise ArgumentError(
                "scale",
                scale,
                f"has shape {scale.shape}; give one number for each of {query.shape[-1]} features "
                "(the width of queries)",
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
    """Return ``Σ scale · tanh(query + key)``: ``[batch, queries, keys]``."""
    scale = tf.ones(shape_of(query)[-1:], query.dtype) if scale is None else scale

    passes = Passes("additive_attention", _forward, _backward, _second)
    (scores,) = differentiable(passes, Options(block=block), [query, key, scale])
    return scores


def _forward(options: Options, inputs: Tensors) -> tuple[tf.Tensor, Tensors]:
    s = AdditiveScores.of(options, inputs)

    def pull(place: Place, blocks: Tensors) -> Any:
        block = s.block(s.at(place)).scores
        return None, [], [s.pairs.set(blocks[0], place, block)]

    _, blocks = over_columns(s, [], lambda j: pull, [s.pairs.zeros()])
    return tf.cast(s.pairs.joined(blocks), inputs[0].dtype), ()


def _backward(
    options: Options, inputs: Tensors, given: Any, scores: Any, kept: Any, upstream: tf.Tensor
) -> list[tf.Tensor]:
    s = AdditiveScores.of(options, inputs)
    upstream = padded(tf.cast(upstream, s.grid.dtype), s.grid.rows, s.grid.columns, 0)

    def pull(place: Place, shared: Tensors) -> Any:
        block = s.block(s.at(place))
        of_query, of_key, shared = block.pullback(place.part(upstream), shared)
        return of_query, [of_key], shared

    found = over_columns(s, [s.key], lambda j: pull, s.shared_sums())
    return [tf.cast(d, x.dtype) for d, x in zip(found, inputs, strict=True)]


def _second(
    options: Options,
    inputs: Tensors,
    given: Any,
    scores: Any,
    kept: Any,
    upstream: tf.Tensor,
    directions: Tensors,
) -> list[tf.Tensor]:
    """Return the gradients for ``inputs`` and ``upstream``."""
    s, to = AdditiveScores.of(options, inputs), AdditiveScores.of(options, directions)
    wide = padded(tf.cast(upstream, s.grid.dtype), s.grid.rows, s.grid.columns, 0)

    def pull(place: Place, sums: Tensors) -> Any:
        *shared, changes = sums
        tangent = s.tangent(s.at(place), to, to.at(place))
        of_query, of_key, shared = tangent.pullback(None, place.part(wide), shared)
        return of_query, [of_key], [*shared, s.pairs.set(changes, place, tangent.change)]

    start = [*s.shared_sums(), s.pairs.zeros()]
    *found, changes = over_columns(s, [s.key], lambda j: pull, start)
    found.append(s.pairs.joined(changes))
    return [tf.cast(d, x.dtype) for d, x in zip(found, [*inputs, upstream], strict=True)]


@dataclass(frozen=True)
class AdditiveScores(TwiceDifferentiable):
    """The scores ``Σ scale · tanh(query + key)``; all three inputs have the dtype of sums.

    A block of queries or keys is ``[batch, size, width]``; ``scale`` is ``[width]``.
    """

    scale: tf.Tensor

    @staticmethod
    def of(
        options: Options, inputs: Tensors, masks: Tensors = (), seed: tf.Tensor | None = None
    ) -> AdditiveScores:
        """Return the scores of queries, keys and ``scale``, which is the last of ``inputs``."""
        query, key, scale = inputs[0], inputs[1], inputs[-1]
        dtype = tf.float64 if query.dtype == tf.float64 else tf.float32
        batch, _, width = shape_of(query)
        # A pass holds two or three blocks of sums. A step with 16 batches of 100 queries and keys
        # of width 256 took 310, 172, 145, 132 and 188 ms of a CPU with 1, 2, 4, 16 and 64 MiB each.
        side = _side(BLOCK_BYTES // 2 // 4, batch, width)
        grid = Grid.of(options, query, key, dtype, (side, side))
        return AdditiveScores(
            grid.masked(masks, seed),
            zero_like(query, dtype),
            grid.rows.split(tf.cast(query, dtype), -2),
            grid.columns.split(tf.cast(key, dtype), -2),
            tf.cast(scale, dtype),
        )

    @property
    def pairs(self) -> BlockMatrix:
        """The layout of a number for each pair."""
        return BlockMatrix(self.grid.rows, self.grid.columns, self.grid.batch, self.grid.dtype)

    def block(self, at: Block, minus: Tensors = ()) -> ScoreBlock:
        """See `Scores.block`."""
        tanh = tf.tanh(_sums(at))

        def pullback(of_scores: tf.Tensor, shared: Tensors) -> Pullback:
            slope = of_scores[..., tf.newaxis]
            of_scale = shared[0] + _over_pairs(tanh, slope)
            with tf.control_dependencies([of_scale]):
                # Nothing else reads `tanh` any more, so its buffer takes the square.
                square = tf.square(tanh)
            part = slope * (1 - square)
            # The factor `scale` is the same for all pairs, so it is applied to the sums.
            of_query, of_key = (tf.reduce_sum(part, axis) * self.scale for axis in (2, 1))
            return of_query, of_key, [of_scale]

        return ScoreBlock(self._masked(at, tanh, minus), pullback)

    def _masked(self, at: Block, tanh: tf.Tensor, minus: Tensors) -> tf.Tensor:
        """Return the scores of a block, as one product of matrices."""
        *shape, width = shape_of(tanh)
        scores = tf.matmul(tf.reshape(tanh, [-1, width]), self.scale[:, tf.newaxis])
        scores = tf.reshape(scores, shape)
        key_mask = self.grid.key_mask(at.place)
        if key_mask is not None:
            scores += tf.linalg.matrix_transpose(key_mask)
        for column in minus:
            scores -= column
        return self.grid.mask_pairs(at.place, scores)

    def tangent(
        self, at: Block, direction: AdditiveScores, to: Block, minus: Tensors = ()
    ) -> ScoreTangent:
        """See `TwiceDifferentiable.tangent`."""
        tanh, moved, scale = tf.tanh(_sums(at)), _sums(to), self.scale
        rise = 1 - tf.square(tanh)
        change = tf.reduce_sum(rise * moved * scale + direction.scale * tanh, -1)

        def pullback(
            of_scores: tf.Tensor | None, of_change: tf.Tensor, shared: Tensors
        ) -> Pullback:
            again = of_change[..., tf.newaxis]
            part = again * (direction.scale - 2 * scale * tanh * moved)
            of_scale = shared[0] + _over_pairs(rise * moved, again)
            if of_scores is not None:
                slope = of_scores[..., tf.newaxis]
                part += slope * scale
                of_scale += _over_pairs(tanh, slope)
            part *= rise
            return tf.reduce_sum(part, 2), tf.reduce_sum(part, 1), [of_scale]

        return ScoreTangent(self._masked(at, tanh, minus), change, pullback)

    def shared_sums(self) -> list[tf.Tensor]:
        """Return the initial sum of gradients for ``scale``: zeros."""
        return [self.zeros(*shape_of(self.scale))]


def _sums(at: Block) -> tf.Tensor:
    """Return queries plus keys: ``[batch, queries, keys, width]``."""
    return at.query[:, :, tf.newaxis] + at.key[:, tf.newaxis]


def _over_pairs(block: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Return the weighted sum over all pairs, ``[width]``, as one product of matrices."""
    width = shape_of(block)[-1]
    sums = tf.matmul(tf.reshape(weights, [-1, 1]), tf.reshape(block, [-1, width]), transpose_a=True)
    return tf.reshape(sums, [width])


def _side(entries: int, batch: Any, width: Any) -> Any:
    """Return the side of square blocks of at most ``entries`` numbers; positive."""
    if isinstance(batch, int) and isinstance(width, int):
        return max(1, math.isqrt(entries // max(1, batch * width)))
    root = tf.sqrt(tf.cast(entries, tf.float32) / tf.cast(maximum(batch * width, 1), tf.float32))
    return maximum(tf.cast(root, tf.int32), 1)
