"""Scores found in a graph, block by block.

The ops of the graph compute a block of scores from a block of products of queries and keys
(`memsaving_gradients.transforms.attention.pattern.elementwise`), with the graph's own numbers. A
graph may mask all keys of a query by adding -1e9 to scores, or replacing scores with it. Then the
maximum and the logarithm of the sum differ so much in size that their sum would lose the logarithm.
Both are kept, and subtracted one after the other. If a mask lets a query see its own position and
earlier ones only, blocks of later keys are not computed.

Blocks of scores have the dtype of the graph; softmax and sums are in ``float32`` at least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memsaving_gradients.transforms.attention.blocks import zero_like
from memsaving_gradients.transforms.attention.grid import Grid, Options
from memsaving_gradients.transforms.attention.pattern.causality import is_causal
from memsaving_gradients.transforms.attention.pattern.elementwise import Elementwise
from memsaving_gradients.transforms.attention.scores import (
    Attention,
    Block,
    Pullback,
    ScoreBlock,
    Scores,
)

__all__ = ["attention"]

Tensors = Sequence[tf.Tensor]


def attention(between: Elementwise, inputs: Tensors) -> Attention:
    """Return the attention of queries, keys and values, ``[..., positions, width]``, in blocks."""
    query, key, value = inputs
    dtype = tf.float64 if tf.float64 in (query.dtype, value.dtype) else tf.float32
    grid = Grid.of(Options(causal=is_causal(between)), query, key, dtype)
    rows, columns = grid.rows, grid.columns
    scores = GraphScores(
        grid,
        zero_like(query, dtype),
        rows.split(query, -2),
        columns.split(key, -2),
        between,
        between.prepared(rows, columns),
    )
    return Attention(scores, columns.split(value, -2))


@dataclass(frozen=True, eq=False)
class GraphScores(Scores):
    """Scores as a graph computes them from products of queries and keys.

    Attributes
    ----------
    between
        The ops between the product and the softmax.
    prepared
        The tensors that blocks take their parts from.
    """

    between: Elementwise
    prepared: Sequence[Any]

    kept = 2

    @property
    def lowest(self) -> float:
        """The initial running maximum: the least number, since no score counts as masked."""
        return float(self.grid.dtype.min)

    def normalized(
        self, most: tf.Tensor, total: tf.Tensor, mixed: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        """Return the output, the maximum, and the logarithm of the sum."""
        length = self.grid.columns.length
        if not isinstance(length, int):
            # Without keys the output is zero. Where -inf masks all keys it is NaN, as in the graph.
            total = tf.where(tf.equal(length, 0), tf.ones_like(total), total)
        return mixed / total, most, tf.math.log(total)

    def block(self, at: Block, minus: Tensors = ()) -> ScoreBlock:
        """See `Scores.block`."""
        product = tf.matmul(at.query, at.key, transpose_b=True)
        made = self.between.block(self.prepared, at.place, product)
        scores = tf.cast(made, self.grid.dtype)
        columns = self.grid.columns
        if columns.is_padded:
            seen = at.place.positions(-1) < columns.length
            scores = tf.where(seen, scores, tf.constant(-math.inf, self.grid.dtype))
        for column in minus:
            scores -= column

        def pullback(of_scores: tf.Tensor, shared: Tensors) -> Pullback:
            (of_product,) = tf.gradients(made, product, tf.cast(of_scores, made.dtype))
            of_query = self.grid.weighted(of_product, at.key)
            of_key = self.grid.weighted(of_product, at.query, transpose=True)
            return of_query, of_key, list(shared)

        return ScoreBlock(scores, pullback)
