"""The gradient of attention's gradient, in the same blocks.

The gradients of ``f = Σ dO·O`` in directions of scores' inputs and of values are the derivative of
``f`` in these directions, ``f' = Σ dO·O'``, whose gradient is asked for. With ``S'`` the change of
scores and ``C`` the direction of values, ``P`` the weights (``M`` drops some of them), ``G = M ∘ (dO
Vᵀ)``, and for each query ``δ = Σ P∘G``:

    σ = Σ P∘S',  P' = P ∘ (S' - σ),  G' = M ∘ (dO Cᵀ)
    O' = (P'∘M) V + (P∘M) C                                   the gradient for dO
    R = G∘S' - σG - δS' + G'                                  that for P
    W = P ∘ (R - Σ P∘R) = P ∘ (R - (f' - σδ))                 that for S
    dS = P ∘ (G - δ)                                          that for S'
    (P'∘M)ᵀ dO                                                that for V

The scores take ``W`` and ``dS`` back to their inputs. A first pass over the blocks makes ``σ`` and
``O'``, a second pass the rest. For dot products these are 15 products where the gradient has 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memsaving_gradients.transforms.attention.blocks import BlockList, loop, shape_of
from memsaving_gradients.transforms.attention.online_softmax import Formula, inner, joined
from memsaving_gradients.transforms.attention.pairs import Place
from memsaving_gradients.transforms.attention.scores import (
    Attention,
    Block,
    ScoreTangent,
    TwiceDifferentiable,
)

__all__ = ["second"]

Tensors = Sequence[tf.Tensor]


def second(
    formula: Formula,
    inputs: Tensors,
    given: Sequence[Any],
    output: tf.Tensor,
    kept: Tensors,
    upstream: tf.Tensor,
    directions: Tensors,
) -> list[tf.Tensor]:
    """Return the gradient for each input, and for ``upstream``.

    Parameters
    ----------
    given, output, kept, upstream
        As in the first gradient.
    directions
        For each input, what its first gradient is multiplied by.
    """
    dtype = tf.float64 if inputs[0].dtype == tf.float64 else tf.float32
    wide, directions = ([tf.cast(x, dtype) for x in xs] for xs in (inputs, directions))
    output, wide_upstream = tf.cast(output, dtype), tf.cast(upstream, dtype)
    at = formula(wide, *given)
    grid = at.scores.grid
    rows, axis = grid.rows, grid.options.axis
    passes = _Passes(at, formula(directions), kept, rows.split(wide_upstream, axis))
    sigma, changes = passes.over_rows(rows.split(output, axis))
    change = rows.join(changes, axis)
    delta = rows.split(inner(output, wide_upstream, dtype), axis)
    gain = rows.split(inner(change, wide_upstream, dtype), axis) - sigma * delta
    found = passes.over_columns(sigma, delta, gain, inputs)
    return [*found, tf.cast(change, upstream.dtype)]


@dataclass(frozen=True)
class _Passes:
    """Both passes.

    Attributes
    ----------
    at
        The attention.
    to
        The directions of its inputs, cut in the same way.
    kept
        What the forward pass kept of each query.
    upstream
        The gradient for the output, in blocks.
    """

    at: Attention
    to: Attention
    kept: Tensors
    upstream: tf.Tensor

    def tangent(self, place: Place) -> ScoreTangent:
        """Return the scores of a block, of which ``exp`` makes weights, and their change."""
        at, to, i, j = self.at.scores, self.to.scores, place.row, place.column
        assert isinstance(at, TwiceDifferentiable)
        block, direction = (Block(place, x.query[i], x.key[j]) for x in (at, to))
        return at.tangent(block, to, direction, [x[i] for x in self.kept])

    def over_rows(self, output: tf.Tensor) -> list[tf.Tensor]:
        """Return ``σ`` and ``O'``, in blocks of queries."""
        scores, grid = self.at.scores, self.at.scores.grid
        row = [*grid.batch, grid.rows.size]
        layouts = [BlockList.like(x, grid.dtype) for x in (self.kept[0], output)]

        def of_queries(i: Any, *lists: tf.Tensor) -> list[tf.Tensor]:
            def with_keys(place: Place, sigma: tf.Tensor, change: tf.Tensor) -> list[tf.Tensor]:
                j, tangent = place.column, self.tangent(place)
                weights = tf.exp(tangent.scores)
                moved = weights * tangent.change
                change += grid.weighted(grid.drop(place, moved), self.at.value[j])
                change += grid.weighted(grid.drop(place, weights), self.to.value[j])
                return [sigma + tf.reduce_sum(moved, -1, keepdims=True), change]

            start = [scores.zeros(*row, n) for n in (1, shape_of(output)[-1])]
            sigma, change = grid.over_keys(i, with_keys, start)
            made = sigma, change - sigma * output[i]
            return [at.set(x, i, m) for at, x, m in zip(layouts, lists, made, strict=True)]

        found = loop(0, grid.rows.count, of_queries, [at.zeros() for at in layouts])
        return [at.stack(x) for at, x in zip(layouts, found, strict=True)]

    def over_columns(
        self, sigma: tf.Tensor, delta: tf.Tensor, gain: tf.Tensor, inputs: Tensors
    ) -> list[tf.Tensor]:
        """Return the gradients for ``inputs``; ``gain`` is ``Σ P∘R``."""
        scores, value, grid = self.at.scores, self.at.value, self.at.scores.grid
        layouts = [BlockList.like(x, grid.dtype) for x in (scores.query, scores.key, value)]
        of_query, of_key, of_value = layouts

        def of_keys(j: Any, dq: tf.Tensor, dk: tf.Tensor, dv: tf.Tensor, *shared: tf.Tensor) -> Any:
            def with_queries(
                place: Place, k: tf.Tensor, v: tf.Tensor, dq: tf.Tensor, *shared: tf.Tensor
            ) -> list[tf.Tensor]:
                i = place.row
                upstream, tangent = self.upstream[i], self.tangent(place)
                weights, change = tf.exp(tangent.scores), tangent.change
                of_weights = grid.drop(place, grid.product(upstream, value[j]))
                slope = of_weights - delta[i]
                # R - Σ P∘R: the first and third term of R, the second term, the last term.
                again = slope * change - sigma[i] * of_weights
                again += grid.drop(place, grid.product(upstream, self.to.value[j])) - gain[i]
                moved = grid.drop(place, weights * (change - sigma[i]))
                v += grid.weighted(moved, upstream, transpose=True)
                q_part, k_part, sums = tangent.pullback(weights * again, weights * slope, shared)
                return [k + k_part, v, of_query.add(dq, i, q_part), *sums]

            start = [scores.zeros(*shape_of(x[j])) for x in (scores.key, value)]
            k, v, dq, *shared = grid.over_queries(j, with_queries, [*start, dq, *shared])
            return [dq, of_key.set(dk, j, k), of_value.set(dv, j, v), *shared]

        start = [*(at.zeros() for at in layouts), *scores.shared_sums()]
        lists = loop(0, grid.columns.count, of_keys, start)
        return joined(self.at, layouts, lists, inputs)
