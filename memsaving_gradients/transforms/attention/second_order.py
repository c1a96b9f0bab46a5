"""The gradient of attention's gradient, in the same blocks.

The gradients of ``f = Σ dO·O`` in directions ``(A, B, C)`` of queries, keys and values are the derivative of ``f`` in these directions:
``f' = Σ dO·O'``, whose gradient is asked for. With ``P`` the weights (``M`` drops some of them), ``G = M ∘ (dO Vᵀ)``, and for each query
``δ = Σ P∘G``:

    S' = A Kᵀ + Q Bᵀ,  σ = Σ P∘S',  P' = P ∘ (S' - σ),  G' = M ∘ (dO Cᵀ)
    O' = (P'∘M) V + (P∘M) C                                   the gradient for dO
    R = G∘S' - σG - δS' + G'                                  that for P
    W = P ∘ (R - Σ P∘R) = P ∘ (R - (f' - σδ))                 that for S
    for Q: W K + dS B,  for K: Wᵀ Q + dSᵀ A,  for V: (P'∘M)ᵀ dO,  with dS = P ∘ (G - δ)

A first pass over the blocks makes ``σ`` and ``O'``, a second one the rest: 15 products where the gradient has 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from memsaving_gradients.transforms.attention import bias_gradients
from memsaving_gradients.transforms.attention.block_passes import Blocks, inner, weights_again
from memsaving_gradients.transforms.attention.blocks import dims, loop
from memsaving_gradients.transforms.attention.scores import Setting

__all__ = ["second"]

Tensors = Sequence[tf.Tensor]


def second(
    setting: Setting,
    inputs: Tensors,
    masks: Tensors,
    seed: tf.Tensor | None,
    output: tf.Tensor,
    logs: tf.Tensor,
    upstream: tf.Tensor,
    directions: Tensors,
) -> list[tf.Tensor]:
    """The gradient for each input, and for ``upstream``."""
    dtypes = [x.dtype for x in (*inputs, upstream)]
    b = Blocks.of(setting, inputs, masks, seed)
    sums = b.grid.sums
    inputs, directions = ([tf.cast(x, sums) for x in xs] for xs in (inputs, directions))
    output, upstream = tf.cast(output, sums), tf.cast(upstream, sums)
    again = _Directions(
        Blocks.of(setting, inputs, masks, seed),
        Blocks.of(setting, directions, (), None),
        logs,
        b.rows(upstream),
    )
    slopes, changed = again.rows(b.rows(output))
    axis = setting.axis
    change = b.grid.rows.join(changed, axis)
    share = b.rows(inner(output, upstream, sums))
    gains = b.rows(inner(change, upstream, sums)) - slopes * share
    dq, dk, dv, *db = again.columns(slopes, share, gains)
    rows, columns = b.grid.rows, b.grid.columns
    found = [cut.join(d, axis) for cut, d in ((rows, dq), (columns, dk), (columns, dv))]
    found += [bias_gradients.joined(b.grid, d) for d in db]
    return [tf.cast(d, t) for d, t in zip([*found, change], dtypes, strict=True)]


class _Directions:
    """Attention, and the directions of its inputs, in blocks; ``upstream`` in blocks of queries."""

    def __init__(self, at: Blocks, to: Blocks, logs: tf.Tensor, upstream: tf.Tensor) -> None:
        self.at, self.to, self.logs, self.upstream = at, to, logs, upstream
        self.grid = at.grid

    def weights_and_slopes(self, i: Any, j: Any, border: bool) -> tuple[tf.Tensor, tf.Tensor]:
        """``P`` and ``S'`` of a block."""
        at, to = self.at, self.to
        weights = weights_again(
            self.grid, (i, j), at.query[i], at.key[j], self.logs[i], border=border
        )
        slopes = self.grid.product(to.query[i], at.key[j]) + self.grid.product(
            at.query[i], to.key[j]
        )
        if to.grid.bias is not None:
            slopes += to.grid.part(to.grid.bias, (i, j))
        return weights, slopes

    def rows(self, output: tf.Tensor) -> list[tf.Tensor]:
        """``σ`` and ``O'``, in blocks of queries."""
        at, to, grid = self.at, self.to, self.grid
        row = [*grid.lead, grid.rows.size]
        of_slopes, of_changes = at.shelf(self.logs), at.shelf(output)

        def of_queries(i: Any, slopes: tf.Tensor, changes: tf.Tensor) -> list[tf.Tensor]:
            def with_keys(j: Any, slope: tf.Tensor, change: tf.Tensor, *, border: bool) -> Any:
                weights, of_scores = self.weights_and_slopes(i, j, border)
                moved = weights * of_scores
                change += at.mixed(grid.drop((i, j), moved), at.value[j])
                change += at.mixed(grid.drop((i, j), weights), to.value[j])
                return [slope + tf.reduce_sum(moved, -1, keepdims=True), change]

            state: Any = [at.zeros(*row, 1), at.zeros(*row, dims(at.value)[-1])]
            for start, stop, border in grid.keys_of(i):
                state = loop(start, stop, partial(with_keys, border=border), state)
            slope, change = state
            change -= slope * output[i]
            return [of_slopes.put(slopes, i, slope), of_changes.put(changes, i, change)]

        shelves = [of_slopes, of_changes]
        found = loop(0, grid.rows.count, of_queries, [shelf.empty() for shelf in shelves])
        return [shelf.stacked(x) for shelf, x in zip(shelves, found, strict=True)]

    def columns(self, slopes: tf.Tensor, share: tf.Tensor, gains: tf.Tensor) -> Any:
        """The gradients for queries, keys, values and bias, in blocks; the arguments: ``σ``, ``δ``, ``Σ P∘R``."""
        at, to, grid = self.at, self.to, self.grid
        shelves = [at.shelf(x) for x in (at.query, at.key, at.value)]
        of_query, of_key, of_value = shelves

        def of_keys(j: Any, dq: tf.Tensor, dk: tf.Tensor, dv: tf.Tensor, *db: tf.Tensor) -> Any:
            def with_queries(
                i: Any, k: tf.Tensor, v: tf.Tensor, dq: tf.Tensor, *db: tf.Tensor, border: bool
            ) -> Any:
                place, up = (i, j), self.upstream[i]
                weights, slope = self.weights_and_slopes(i, j, border)
                of_weights = grid.drop(place, grid.product(up, at.value[j]))
                moved = of_weights - share[i]
                # R, with its first and third, and its second term in one.
                again = moved * slope - slopes[i] * of_weights
                again += grid.drop(place, grid.product(up, to.value[j])) - gains[i]
                again *= weights
                of_scores = weights * moved
                v += at.mixed(grid.drop(place, weights * (slope - slopes[i])), up, turned=True)
                k += at.mixed(again, at.query[i], turned=True)
                k += at.mixed(of_scores, to.query[i], turned=True)
                q = at.mixed(again, at.key[j]) + at.mixed(of_scores, to.key[j])
                parts = [bias_gradients.add_part(grid, d, place, again) for d in db]
                return [k, v, of_query.add(dq, i, q), *parts]

            state: Any = [at.zeros(*dims(x[j])) for x in (at.key, at.value)]
            state += [dq, *db]
            for start, stop, border in grid.queries_of(j):
                state = loop(start, stop, partial(with_queries, border=border), state)
            k, v, dq, *rest = state
            return [dq, of_key.put(dk, j, k), of_value.put(dv, j, v), *rest]

        empty = [shelf.empty() for shelf in (*shelves, *bias_gradients.shelf(grid))]
        dq, dk, dv, *db = loop(0, grid.columns.count, of_keys, empty)
        return [
            *(shelf.stacked(d) for shelf, d in zip(shelves, (dq, dk, dv), strict=True)),
            *db,
        ]
