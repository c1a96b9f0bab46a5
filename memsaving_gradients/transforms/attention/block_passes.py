"""Attention block by block: the forward pass, and its gradient.

Forward, a running maximum and a running sum make the softmax of a row while its blocks go by (Milakov & Gimelshein 2018,
arXiv 1805.02867; Rabe & Staats 2021, arXiv 2112.05682; Dao et al. 2022, arXiv 2205.14135). Output and logarithm of the sum are
kept. The gradient makes each block of weights again from these: ``P = exp(S - lse)``, and with ``δ = Σ dO·O`` for each query

    dV = Pᵀ dO,  dS = P ∘ (dO Vᵀ - δ),  dQ = dS K,  dK = dSᵀ Q.

Products of matrices: 2 forward, 5 in the gradient, where plain attention has 2 and 4.

In all of it ``Q[i]`` is a block of queries, ``K[j]`` and ``V[j]`` are blocks of keys and values; weights that are dropped are drawn anew for
their block, the same ones each time. Sums are made in ``float32`` at least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from memsaving_gradients.transforms.attention import bias_gradients
from memsaving_gradients.transforms.attention.blocks import (
    Cut,
    Shelf,
    block_sizes,
    dims,
    loop,
    zero_like,
)
from memsaving_gradients.transforms.attention.scores import NEVER, Grid, Setting

__all__ = ["Blocks", "backward", "forward", "inner", "weights_again"]

Tensors = Sequence[tf.Tensor]

#: In place of the logarithm of a sum where no key is seen: it makes all weights zero.
NOTHING = -NEVER


@dataclass(frozen=True)
class Blocks:
    """Queries, keys and values: ``[count, ..., size, width]``.

    Attributes
    ----------
    grid
        What is to be known of their pairs.
    zero
        A scalar to fill sums with.
    """

    grid: Grid
    zero: tf.Tensor
    query: tf.Tensor
    key: tf.Tensor
    value: tf.Tensor

    @staticmethod
    def of(setting: Setting, inputs: Tensors, masks: Tensors, seed: tf.Tensor | None) -> Blocks:
        query, key, value, *bias = inputs
        axis, rank = setting.axis, query.shape.rank
        lead = [n for i, n in enumerate(dims(query)[:-1]) if i != rank + axis]
        rows, columns = dims(query)[axis], dims(key)[axis]
        largest: Any = setting.block
        if largest is None:
            largest = block_sizes(math.prod(lead), rows, columns, dims(key)[-1])
        sums = tf.float64 if query.dtype == tf.float64 else tf.float32
        grid = Grid(setting, Cut.of(rows, largest[0]), Cut.of(columns, largest[1]), lead, sums)
        return Blocks(
            grid.with_masks(masks, bias[0] if bias else None, seed),
            zero_like(query, sums),
            grid.rows.split(query, axis),
            grid.columns.split(key, axis),
            grid.columns.split(value, axis),
        )

    def rows(self, x: tf.Tensor) -> tf.Tensor:
        """Blocks of queries of ``x``."""
        return self.grid.rows.split(x, self.grid.setting.axis)

    def zeros(self, *shape: Any) -> tf.Tensor:
        """For sums."""
        return tf.fill(shape, self.zero)

    def shelf(self, blocks: tf.Tensor) -> Shelf:
        """For sums as large as ``blocks``."""
        return Shelf.like(blocks, self.grid.sums)

    def mixed(self, weights: tf.Tensor, x: tf.Tensor, *, turned: bool = False) -> tf.Tensor:
        """``weights @ x``, or ``weightsᵀ @ x``: multiplied in the dtype of ``x``, for a sum."""
        return tf.cast(tf.matmul(tf.cast(weights, x.dtype), x, transpose_a=turned), self.grid.sums)


def forward(
    setting: Setting, inputs: Tensors, masks: Tensors, seed: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """The output, and for each block of queries the logarithms of the sums."""
    b = Blocks.of(setting, inputs, masks, seed)
    grid = b.grid
    row = [*grid.lead, grid.rows.size]
    width = dims(b.value)[-1]
    of_outputs = Shelf(grid.rows.count, [*row, width], b.value.dtype)
    of_logs = Shelf(grid.rows.count, [*row, 1], grid.sums)

    def of_queries(i: Any, outputs: tf.Tensor, logs: tf.Tensor) -> list[tf.Tensor]:
        query = b.query[i]

        # most, total: maximum and sum of the row so far; mixed: the sum of weighted values. Both sums are of exp(S - most).
        def with_keys(
            j: Any, most: tf.Tensor, total: tf.Tensor, mixed: tf.Tensor, *, border: bool
        ) -> list[tf.Tensor]:
            scores = grid.scores((i, j), query, b.key[j], border=border)
            higher = tf.maximum(most, tf.reduce_max(scores, -1, keepdims=True))
            weights = tf.exp(scores - higher)
            fall = tf.exp(most - higher)
            total = total * fall + tf.reduce_sum(weights, -1, keepdims=True)
            mixed = mixed * fall + b.mixed(grid.drop((i, j), weights), b.value[j])
            return [higher, total, mixed]

        # No masked score comes near this maximum: its weight is zero also where no key was seen so far.
        state: Any = [
            tf.fill([*row, 1], tf.constant(NEVER / 2, grid.sums)),
            b.zeros(*row, 1),
            b.zeros(*row, width),
        ]
        for start, stop, border in grid.keys_of(i):
            state = loop(start, stop, partial(with_keys, border=border), state)
        most, total, mixed = state
        output = tf.math.divide_no_nan(mixed, total)
        log = tf.where(total > 0, most + tf.math.log(total), tf.constant(NOTHING, grid.sums))
        return [of_outputs.put(outputs, i, output), of_logs.put(logs, i, log)]

    outputs, logs = loop(0, grid.rows.count, of_queries, [of_outputs.empty(), of_logs.empty()])
    return grid.rows.join(of_outputs.stacked(outputs), setting.axis), of_logs.stacked(logs)


def weights_again(
    grid: Grid,
    place: tuple[Any, Any],
    query: tf.Tensor,
    key: tf.Tensor,
    log: tf.Tensor,
    *,
    border: bool,
) -> tf.Tensor:
    """The weights of a block, made again."""
    return tf.exp(grid.scores(place, query, key, log, border=border))


def backward(
    setting: Setting,
    inputs: Tensors,
    masks: Tensors,
    seed: tf.Tensor | None,
    output: tf.Tensor,
    logs: tf.Tensor,
    upstream: tf.Tensor,
) -> list[tf.Tensor]:
    """The gradient for each input."""
    b = Blocks.of(setting, inputs, masks, seed)
    grid = b.grid
    rows, columns = grid.rows, grid.columns
    of_output = b.rows(upstream)
    shares = b.rows(inner(output, upstream, grid.sums))
    shelves = [b.shelf(x) for x in (b.query, b.key, b.value)]
    of_query, of_key, of_value = shelves
    of_bias = bias_gradients.shelf(grid)

    def of_keys(
        j: Any, dq: tf.Tensor, dk: tf.Tensor, dv: tf.Tensor, *db: tf.Tensor
    ) -> list[tf.Tensor]:
        key, value = b.key[j], b.value[j]

        def with_queries(
            i: Any, k: tf.Tensor, v: tf.Tensor, dq: tf.Tensor, *db: tf.Tensor, border: bool
        ) -> list[tf.Tensor]:
            query, upstream = b.query[i], of_output[i]
            weights = weights_again(grid, (i, j), query, key, logs[i], border=border)
            v += b.mixed(grid.drop((i, j), weights), upstream, turned=True)
            if setting.rate:
                shifted = grid.drop((i, j), grid.product(upstream, value)) - shares[i]
            else:
                shifted = grid.product(upstream, value, shares[i])
            of_scores = weights * shifted
            k += b.mixed(of_scores, query, turned=True)
            dq = of_query.add(dq, i, b.mixed(of_scores, key))
            return [k, v, dq, *(bias_gradients.add_part(grid, d, (i, j), of_scores) for d in db)]

        state: Any = [b.zeros(*dims(key)), b.zeros(*dims(value)), dq, *db]
        for start, stop, border in grid.queries_of(j):
            state = loop(start, stop, partial(with_queries, border=border), state)
        k, v, dq, *rest = state
        return [dq, of_key.put(dk, j, k), of_value.put(dv, j, v), *rest]

    empty = [shelf.empty() for shelf in (*shelves, *of_bias)]
    dq, dk, dv, *db = loop(0, columns.count, of_keys, empty)
    sums = zip((rows, columns, columns), shelves, (dq, dk, dv), strict=True)
    found = [cut.join(shelf.stacked(d), setting.axis) for cut, shelf, d in sums]
    found += [bias_gradients.joined(grid, d) for d in db]
    return [tf.cast(d, x.dtype) for d, x in zip(found, inputs, strict=True)]


def inner(a: tf.Tensor, b: tf.Tensor, sums: tf.DType) -> tf.Tensor:
    """The inner product of each position of ``a`` with that of ``b``."""
    return tf.reduce_sum(tf.cast(a, sums) * tf.cast(b, sums), -1, keepdims=True)
