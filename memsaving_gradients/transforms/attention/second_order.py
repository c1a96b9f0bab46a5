"""The gradient of attention's gradient, in the same blocks.

The derivative of ``f = Σ dO·O`` in directions of the scores' inputs and of values is
``f' = Σ dO·O'``. This module computes the gradient of ``f'``. ``S'`` is the change of scores, ``C``
the direction of values. ``P`` are the weights, of which ``M`` drops some. ``G = M ∘ (dO Vᵀ)``, and
``δ = Σ P∘G`` for each query:

    σ = Σ P∘S',  P' = P ∘ (S' - σ),  G' = M ∘ (dO Cᵀ)
    O' = (P'∘M) V + (P∘M) C                                   the gradient for dO
    R = G∘S' - σG - δS' + G'                                  the gradient for P
    W = P ∘ (R - Σ P∘R) = P ∘ (R - (f' - σδ))                 the gradient for S
    dS = P ∘ (G - δ)                                          the gradient for S'
    (P'∘M)ᵀ dO                                                the gradient for V

The scores take ``W`` and ``dS`` back to their inputs. A first pass over the blocks computes ``σ``
and ``O'``, a second pass the rest. For dot products there are 15 products; the gradient has 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memsaving_gradients.transforms.attention.blocks import BlockList, shape_of
from memsaving_gradients.transforms.attention.online_softmax import Formula, gradients, inner
from memsaving_gradients.transforms.attention.pairs import Place
from memsaving_gradients.transforms.attention.passes import over_columns, over_rows
from memsaving_gradients.transforms.attention.scores import (
    Attention,
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
        For each input, the tensor by which its first gradient is multiplied.
    """
    dtype = tf.float64 if inputs[0].dtype == tf.float64 else tf.float32
    wide, directions = ([tf.cast(x, dtype) for x in xs] for xs in (inputs, directions))
    output, wide_upstream = tf.cast(output, dtype), tf.cast(upstream, dtype)
    at = formula(wide, *given)
    grid = at.scores.grid
    rows, axis = grid.rows, grid.options.axis
    passes = _Passes(at, formula(directions), kept, rows.split(wide_upstream, axis))
    sigma, changes = passes.changes(rows.split(output, axis))
    change = rows.join(changes, axis)
    delta = rows.split(inner(output, wide_upstream, dtype), axis)
    gain = rows.split(inner(change, wide_upstream, dtype), axis) - sigma * delta
    found = gradients(at.scores, passes.gradients(sigma, delta, gain), inputs)
    return [*found, tf.cast(change, upstream.dtype)]


@dataclass(frozen=True)
class _Passes:
    """The two passes over the blocks.

    Attributes
    ----------
    at
        The attention.
    to
        The directions of its inputs, in the same blocks.
    kept
        The numbers that the forward pass kept for each query.
    upstream
        The gradient for the output, in blocks.
    """

    at: Attention
    to: Attention
    kept: Tensors
    upstream: tf.Tensor

    def tangent(self, place: Place) -> ScoreTangent:
        """Return the scores of a block, whose exponentials are the weights, and their change."""
        at, to = self.at.scores, self.to.scores
        assert isinstance(at, TwiceDifferentiable)
        return at.tangent(at.at(place), to, to.at(place), [x[place.row] for x in self.kept])

    def changes(self, output: tf.Tensor) -> list[tf.Tensor]:
        """Return ``σ`` and ``O'``, in blocks of queries."""
        scores, grid = self.at.scores, self.at.scores.grid

        def step(place: Place, sigma: tf.Tensor, change: tf.Tensor) -> list[tf.Tensor]:
            j, tangent = place.column, self.tangent(place)
            weights = tf.exp(tangent.scores)
            moved = weights * tangent.change
            change += grid.weighted(grid.drop(place, moved), self.at.value[j])
            change += grid.weighted(grid.drop(place, weights), self.to.value[j])
            return [sigma + tf.reduce_sum(moved, -1, keepdims=True), change]

        def row(i: Any) -> Any:
            shape = [*grid.batch, grid.rows.size]
            start = [scores.zeros(*shape, n) for n in (1, shape_of(output)[-1])]
            return start, step, lambda sigma, change: (sigma, change - sigma * output[i])

        return over_rows(
            scores, [BlockList.like(x, grid.dtype) for x in (self.kept[0], output)], row
        )

    def gradients(self, sigma: tf.Tensor, delta: tf.Tensor, gain: tf.Tensor) -> list[tf.Tensor]:
        """Return the gradients for queries, keys, values and shared sums; ``gain`` is ``Σ P∘R``."""
        scores, value, grid = self.at.scores, self.at.value, self.at.scores.grid

        def pull(place: Place, shared: Tensors) -> Any:
            i, j = place.row, place.column
            upstream, tangent = self.upstream[i], self.tangent(place)
            weights, change = tf.exp(tangent.scores), tangent.change
            of_weights = grid.drop(place, grid.product(upstream, value[j]))
            slope = of_weights - delta[i]
            # R - Σ P∘R: the first and third term of R, the second term, the last term.
            again = slope * change - sigma[i] * of_weights
            again += grid.drop(place, grid.product(upstream, self.to.value[j])) - gain[i]
            moved = grid.drop(place, weights * (change - sigma[i]))
            of_value = grid.weighted(moved, upstream, transpose=True)
            of_query, of_key, sums = tangent.pullback(weights * again, weights * slope, shared)
            return of_query, [of_key, of_value], sums

        return over_columns(scores, [scores.key, value], lambda j: pull, scores.shared_sums())
