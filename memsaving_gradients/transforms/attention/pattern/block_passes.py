"""Both passes of attention whose scores come from a graph, block by block.

As in `memsaving_gradients.transforms.attention.block_passes`, but what is done between product and softmax is whatever the graph does there
(`memsaving_gradients.transforms.attention.pattern.elementwise`), with the numbers that the graph has. A row of scores may therefore be all masked, by -1e9 that
is put in its place or added: then maximum and logarithm of the sum are far apart in size, so they are kept apart, and are subtracted one
after the other. One pass over each block more, for that and for what is done with scores. Blocks behind a query that a mask forbids
(`memsaving_gradients.transforms.attention.pattern.causality`) are not computed.

Blocks of scores are of the dtype that they have in the graph; softmax and sums are of ``float32`` at least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memsaving_gradients.transforms.attention.block_passes import inner
from memsaving_gradients.transforms.attention.blocks import (
    Cut,
    Shelf,
    block_sizes,
    dims,
    loop,
    zero_like,
)
from memsaving_gradients.transforms.attention.pattern.causality import is_causal
from memsaving_gradients.transforms.attention.pattern.elementwise import Elementwise, Place
from memsaving_gradients.transforms.attention.scores import Grid, Setting

__all__ = ["backward", "forward"]

_AXIS = -2


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Queries, keys and values in blocks, ``[count, ..., size, width]``, and what is done with their products."""

    between: Elementwise
    prepared: Sequence[Any]
    grid: Grid
    zero: tf.Tensor
    query: tf.Tensor
    key: tf.Tensor
    value: tf.Tensor

    @staticmethod
    def of(between: Elementwise, inputs: Sequence[tf.Tensor]) -> _Blocks:
        query, key, value = inputs
        lead = dims(query)[:-2]
        lengths = dims(query)[-2], dims(key)[-2]
        largest = block_sizes(math.prod(lead), *lengths, dims(key)[-1])
        rows, columns = (Cut.of(n, most) for n, most in zip(lengths, largest, strict=True))
        sums = tf.float64 if tf.float64 in (query.dtype, value.dtype) else tf.float32
        setting = Setting(causal=is_causal(between))
        return _Blocks(
            between,
            between.prepared(rows, columns),
            Grid(setting, rows, columns, lead, sums),
            zero_like(query, sums),
            rows.split(query, _AXIS),
            columns.split(key, _AXIS),
            columns.split(value, _AXIS),
        )

    @property
    def rows(self) -> Cut:
        return self.grid.rows

    @property
    def columns(self) -> Cut:
        return self.grid.columns

    @property
    def sums(self) -> tf.DType:
        return self.grid.sums

    def zeros(self, *shape: Any) -> tf.Tensor:
        return tf.fill(shape, self.zero)

    def scores(self, i: Any, j: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The product of two blocks, what the graph makes of it, and that for the softmax."""
        product = tf.matmul(self.query[i], self.key[j], transpose_b=True)
        place = Place(self.rows, self.columns, i, j)
        made = self.between.block(self.prepared, place, product)
        scores = tf.cast(made, self.sums)
        seen = place.seen()
        if seen is not None:
            scores = tf.where(seen, scores, tf.constant(-math.inf, self.sums))
        return product, made, scores

    def mixed(self, weights: tf.Tensor, x: tf.Tensor, *, turned: bool = False) -> tf.Tensor:
        """``weights @ x``, or ``weightsᵀ @ x``: multiplied in the dtype of ``x``, for a sum."""
        return tf.cast(tf.matmul(tf.cast(weights, x.dtype), x, transpose_a=turned), self.sums)


def forward(between: Elementwise, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The output; and for each block of queries the largest scores, and the logarithms of the sums of ``exp(score - largest)``."""
    b = _Blocks.of(between, inputs)
    row = [*b.grid.lead, b.rows.size]
    width = dims(b.value)[-1]
    of_outputs = Shelf(b.rows.count, [*row, width], b.value.dtype)
    of_rows = Shelf(b.rows.count, [*row, 1], b.sums)

    def of_queries(i: Any, outputs: tf.Tensor, mosts: tf.Tensor, logs: tf.Tensor) -> Any:
        # most, total: maximum and sum of the row so far; mixed: the sum of weighted values. Both sums are of exp(S - most).
        def with_keys(j: Any, most: tf.Tensor, total: tf.Tensor, mixed: tf.Tensor) -> Any:
            _, _, scores = b.scores(i, j)
            higher = tf.maximum(most, tf.reduce_max(scores, -1, keepdims=True))
            weights = tf.exp(scores - higher)
            fall = tf.exp(most - higher)
            total = total * fall + tf.reduce_sum(weights, -1, keepdims=True)
            return [higher, total, mixed * fall + b.mixed(weights, b.value[j])]

        state: Any = [
            tf.fill([*row, 1], tf.constant(b.sums.min, b.sums)),
            b.zeros(*row, 1),
            b.zeros(*row, width),
        ]
        for start, stop, _ in b.grid.keys_of(i):
            state = loop(start, stop, with_keys, state)
        most, total, mixed = state
        if not isinstance(b.columns.length, int):
            # Without keys the output is zero; where all are masked by -inf it is no number, as in the plain graph.
            total = tf.where(tf.equal(b.columns.length, 0), tf.ones_like(total), total)
        return [
            of_outputs.put(outputs, i, mixed / total),
            of_rows.put(mosts, i, most),
            of_rows.put(logs, i, tf.math.log(total)),
        ]

    shelves = [of_outputs, of_rows, of_rows]
    made = loop(0, b.rows.count, of_queries, [shelf.empty() for shelf in shelves])
    outputs, mosts, logs = (shelf.stacked(x) for shelf, x in zip(shelves, made, strict=True))
    return [b.rows.join(outputs, _AXIS), mosts, logs]


def backward(
    between: Elementwise,
    inputs: Sequence[tf.Tensor],
    kept: Sequence[tf.Tensor],
    upstream: tf.Tensor,
    wanted: tuple[bool, bool, bool],
) -> list[tf.Tensor | None]:
    """The gradients for queries, keys and values, those that are wanted. ``kept``: what `forward` gave."""
    b = _Blocks.of(between, inputs)
    output, mosts, logs = kept
    of_output = b.rows.split(upstream, _AXIS)
    shares = b.rows.split(inner(output, upstream, b.sums), _AXIS)
    for_query, for_key, for_value = wanted
    shelves = [Shelf.like(x, b.sums) for x in (b.query, b.key, b.value)]
    of_query, of_key, of_value = shelves

    def of_keys(j: Any, dq: tf.Tensor, dk: tf.Tensor, dv: tf.Tensor) -> Any:
        def with_queries(i: Any, k: tf.Tensor, v: tf.Tensor, dq: tf.Tensor) -> Any:
            product, made, scores = b.scores(i, j)
            weights = tf.exp(scores - mosts[i] - logs[i])
            if for_value:
                v += b.mixed(weights, of_output[i], turned=True)
            if not (for_query or for_key):
                return [k, v, dq]
            of_weights = tf.matmul(of_output[i], b.value[j], transpose_b=True)
            of_scores = weights * (tf.cast(of_weights, b.sums) - shares[i])
            (of_product,) = tf.gradients(made, product, tf.cast(of_scores, made.dtype))
            if for_key:
                k += b.mixed(of_product, b.query[i], turned=True)
            if for_query:
                dq = of_query.add(dq, i, b.mixed(of_product, b.key[j]))
            return [k, v, dq]

        state: Any = [b.zeros(*dims(x[j])) for x in (b.key, b.value)]
        state.append(dq)
        for start, stop, _ in b.grid.queries_of(j):
            state = loop(start, stop, with_queries, state)
        k, v, dq = state
        return [dq, of_key.put(dk, j, k), of_value.put(dv, j, v)]

    sums = loop(0, b.columns.count, of_keys, [shelf.empty() for shelf in shelves])
    cuts = (b.rows, b.columns, b.columns)
    found: list[tf.Tensor | None] = [
        tf.cast(cut.join(shelf.stacked(total), _AXIS), x.dtype) if asked else None
        for total, shelf, cut, x, asked in zip(sums, shelves, cuts, inputs, wanted, strict=True)
    ]
    return found
