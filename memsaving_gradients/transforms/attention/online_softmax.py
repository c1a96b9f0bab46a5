"""Attention block by block, with an online softmax: the forward pass, and its gradient.

The forward pass computes the softmax of a row block by block, with a running maximum and sum
(Milakov & Gimelshein 2018, arXiv 1805.02867; Rabe & Staats 2021, arXiv 2112.05682; Dao et al. 2022,
arXiv 2205.14135). It keeps only the output and the logarithm of the sum. The gradient recomputes
the weights of each block from them: ``P = exp(S - lse)``. With ``δ = Σ dO·O`` for each query:

    dV = Pᵀ dO,  dS = P ∘ (dO Vᵀ - δ).

`memsaving_gradients.transforms.attention.scores` computes ``S`` and takes ``dS`` back to queries
and keys. For dot products there are 2 products of matrices in the forward pass and 5 in the
gradient; plain attention has 2 and 4.

Everywhere, ``query[i]`` is a block of queries, ``key[j]`` and ``value[j]`` are blocks of keys and
values. Dropout selects the same weights of a block each time. Sums are in ``float32`` at least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from memsaving_gradients.transforms.attention.blocks import BlockList, shape_of
from memsaving_gradients.transforms.attention.pairs import Place
from memsaving_gradients.transforms.attention.passes import over_columns, over_rows
from memsaving_gradients.transforms.attention.scores import Attention, Block, Scores

__all__ = ["Formula", "backward", "forward", "gradients", "inner"]

#: ``formula(inputs, masks, seed)`` returns an attention in blocks.
Formula = Callable[..., Attention]

Tensors = Sequence[tf.Tensor]


def forward(formula: Formula, inputs: Tensors, *given: Any) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Return the output, and the numbers that are kept for each query, in blocks."""
    attention = formula(inputs, *given)
    scores, value, grid = attention.scores, attention.value, attention.scores.grid
    shape, width = [*grid.batch, grid.rows.size], shape_of(value)[-1]
    of_rows = BlockList(grid.rows.count, [*shape, 1], grid.dtype)
    of_output = BlockList(grid.rows.count, [*shape, width], value.dtype)

    def row(i: Any) -> Any:
        query = scores.query[i]

        # most, total: maximum and sum of the row so far. mixed: the sum of weighted values so far.
        # Both sums are of exp(score - most).
        def step(
            place: Place, most: tf.Tensor, total: tf.Tensor, mixed: tf.Tensor
        ) -> list[tf.Tensor]:
            j = place.column
            block = scores.block(Block(place, query, scores.key[j])).scores
            higher = tf.maximum(most, tf.reduce_max(block, -1, keepdims=True))
            weights = tf.exp(block - higher)
            fall = tf.exp(most - higher)
            total = total * fall + tf.reduce_sum(weights, -1, keepdims=True)
            mixed = mixed * fall + grid.weighted(grid.drop(place, weights), value[j])
            return [higher, total, mixed]

        lowest = tf.fill([*shape, 1], tf.constant(scores.lowest, grid.dtype))
        start = [lowest, scores.zeros(*shape, 1), scores.zeros(*shape, width)]
        return start, step, scores.normalized

    output, *kept = over_rows(scores, [of_output, *[of_rows] * scores.kept], row)
    return grid.rows.join(output, grid.options.axis), kept


def backward(
    formula: Formula,
    inputs: Tensors,
    given: Sequence[Any],
    output: tf.Tensor,
    kept: Tensors,
    upstream: tf.Tensor,
    wanted: Sequence[bool] = (True, True, True),
) -> list[Any]:
    """Return the gradient for each input, ``None`` where it is not wanted.

    Parameters
    ----------
    given
        Masks and the seed, as in the forward pass.
    output, kept
        The results of the forward pass.
    upstream
        The gradient for the output.
    wanted
        Whether queries, keys and values need a gradient.
    """
    attention = formula(inputs, *given)
    scores, value, grid = attention.scores, attention.value, attention.scores.grid
    axis = grid.options.axis
    of_output = grid.rows.split(upstream, axis)
    deltas = grid.rows.split(inner(output, upstream, grid.dtype), axis)
    for_query, for_key, for_value = wanted

    def column(j: Any) -> Any:
        key, values = scores.key[j], value[j]

        def pull(place: Place, shared: Tensors) -> Any:
            i, of_query, of_key, of_value = place.row, None, None, None
            upstream = of_output[i]
            block = scores.block(Block(place, scores.query[i], key), [x[i] for x in kept])
            weights = tf.exp(block.scores)
            if for_value:
                of_value = grid.weighted(grid.drop(place, weights), upstream, transpose=True)
            if for_query or for_key:
                if scores.subtracts_in_product and not grid.options.dropout:
                    slope = grid.product(upstream, values, deltas[i])
                else:
                    slope = grid.drop(place, grid.product(upstream, values)) - deltas[i]
                of_query, of_key, shared = block.pullback(weights * slope, shared)
            return of_query if for_query else None, [of_key if for_key else None, of_value], shared

        return pull

    found = over_columns(scores, [scores.key, value], column, scores.shared_sums(), wanted)
    return gradients(scores, found, inputs)


def gradients(scores: Scores, found: Sequence[Any], inputs: Tensors) -> list[Any]:
    """Return gradients for queries, keys, values and shared inputs, of the inputs' dtypes."""
    found = [*found[:3], *scores.shared_gradients(found[3:])]
    return [None if d is None else tf.cast(d, x.dtype) for d, x in zip(found, inputs, strict=True)]


def inner(a: tf.Tensor, b: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return the inner product of ``a`` and ``b`` at each position, in ``dtype``."""
    return tf.reduce_sum(tf.cast(a, dtype) * tf.cast(b, dtype), -1, keepdims=True)
