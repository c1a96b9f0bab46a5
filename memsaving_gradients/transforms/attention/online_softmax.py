"""Attention block by block, with an online softmax: the forward pass, and its gradient.

Forward, a running maximum and a running sum make the softmax of a row while its blocks go by (Milakov
& Gimelshein 2018, arXiv 1805.02867; Rabe & Staats 2021, arXiv 2112.05682; Dao et al. 2022, arXiv
2205.14135). Only the output and the logarithm of the sum are kept. The gradient recomputes the
weights of each block from them: ``P = exp(S - lse)``, and with ``δ = Σ dO·O`` for each query

    dV = Pᵀ dO,  dS = P ∘ (dO Vᵀ - δ).

`memsaving_gradients.transforms.attention.scores` computes ``S`` and takes ``dS`` back to queries and
keys. For dot products this makes 2 products of matrices forward and 5 in the gradient; plain
attention has 2 and 4.

In all of it, ``query[i]`` is a block of queries, ``key[j]`` and ``value[j]`` are blocks of keys and
values. Dropout draws the weights of a block again, the same ones each time. Sums are in ``float32``
at least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from memsaving_gradients.transforms.attention.blocks import BlockList, loop, shape_of
from memsaving_gradients.transforms.attention.pairs import Place
from memsaving_gradients.transforms.attention.scores import Attention, Block

__all__ = ["Formula", "backward", "forward", "inner"]

#: ``formula(inputs, masks, seed)``: an attention of queries, keys, values, and what all blocks share.
Formula = Callable[..., Attention]

Tensors = Sequence[tf.Tensor]


def forward(formula: Formula, inputs: Tensors, *given: Any) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Return the output, and what is kept of each query, in blocks."""
    attention = formula(inputs, *given)
    scores, value, grid = attention.scores, attention.value, attention.scores.grid
    row, width = [*grid.batch, grid.rows.size], shape_of(value)[-1]
    of_rows = BlockList(grid.rows.count, [*row, 1], grid.dtype)
    layouts = [BlockList(grid.rows.count, [*row, width], value.dtype), *[of_rows] * scores.kept]

    def of_queries(i: Any, *lists: tf.Tensor) -> list[tf.Tensor]:
        query = scores.query[i]

        # most, total: maximum and sum of the row so far. mixed: the sum of weighted values so far.
        # Both sums are of exp(score - most).
        def with_keys(
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

        lowest = tf.fill([*row, 1], tf.constant(scores.lowest, grid.dtype))
        start = [lowest, scores.zeros(*row, 1), scores.zeros(*row, width)]
        made = scores.normalized(*grid.over_keys(i, with_keys, start))
        return [at.set(x, i, m) for at, x, m in zip(layouts, lists, made, strict=True)]

    lists = loop(0, grid.rows.count, of_queries, [at.zeros() for at in layouts])
    output, *kept = (at.stack(x) for at, x in zip(layouts, lists, strict=True))
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
    layouts = [BlockList.like(x, grid.dtype) for x in (scores.query, scores.key, value)]
    of_query, of_key, of_value = layouts

    def of_keys(j: Any, dq: tf.Tensor, dk: tf.Tensor, dv: tf.Tensor, *shared: tf.Tensor) -> Any:
        key, values = scores.key[j], value[j]

        def with_queries(
            place: Place, k: tf.Tensor, v: tf.Tensor, dq: tf.Tensor, *shared: tf.Tensor
        ) -> list[tf.Tensor]:
            i = place.row
            query, upstream = scores.query[i], of_output[i]
            block = scores.block(Block(place, query, key), [x[i] for x in kept])
            weights = tf.exp(block.scores)
            if for_value:
                v += grid.weighted(grid.drop(place, weights), upstream, transpose=True)
            if not (for_query or for_key):
                return [k, v, dq, *shared]
            if grid.options.dropout:
                slope = grid.drop(place, grid.product(upstream, values)) - deltas[i]
            else:
                slope = grid.product(upstream, values, deltas[i])
            q_part, k_part, sums = block.pullback(weights * slope, shared)
            if for_key:
                k += k_part
            if for_query:
                dq = of_query.add(dq, i, q_part)
            return [k, v, dq, *sums]

        start = [scores.zeros(*shape_of(x)) for x in (key, values)]
        k, v, dq, *shared = grid.over_queries(j, with_queries, [*start, dq, *shared])
        return [dq, of_key.set(dk, j, k), of_value.set(dv, j, v), *shared]

    start = [*(at.zeros() for at in layouts), *scores.shared_sums()]
    lists = loop(0, grid.columns.count, of_keys, start)
    return joined(attention, layouts, lists, inputs, wanted)


def joined(
    attention: Attention,
    layouts: Sequence[BlockList],
    sums: Tensors,
    inputs: Tensors,
    wanted: Sequence[bool] = (True, True, True),
) -> list[Any]:
    """Return the gradients for ``inputs`` from their sums: three lists of blocks, and shared sums."""
    grid = attention.scores.grid
    axes = (grid.rows, grid.columns, grid.columns)
    found: list[Any] = [
        axis.join(at.stack(x), grid.options.axis) if asked else None
        for axis, at, x, asked in zip(axes, layouts, sums[:3], wanted, strict=True)
    ]
    found += attention.scores.shared_gradients(sums[3:])
    return [None if d is None else tf.cast(d, x.dtype) for d, x in zip(found, inputs, strict=True)]


def inner(a: tf.Tensor, b: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return the inner product of each position of ``a`` with that of ``b``, in ``dtype``."""
    return tf.reduce_sum(tf.cast(a, dtype) * tf.cast(b, dtype), -1, keepdims=True)
