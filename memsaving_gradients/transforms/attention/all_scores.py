"""All scores of an attention at once, computed block by block: what Keras' softmax reads.

The passes are those of attention in blocks without softmax and values: forward each block of scores
is stored, and in the gradient each block of the upstream gradient goes back to queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from memsaving_gradients.transforms.attention.attend import Kind
from memsaving_gradients.transforms.attention.blocks import BlockList, loop, run
from memsaving_gradients.transforms.attention.custom_gradient import differentiable
from memsaving_gradients.transforms.attention.pairs import BlockMatrix, Place, padded
from memsaving_gradients.transforms.attention.scores import Block, Pullback, Scores

__all__ = ["scores"]

Tensors = Sequence[tf.Tensor]


def scores(kind: Kind, inputs: Tensors) -> tf.Tensor:
    """Return the scores of queries, keys, and what all blocks share: ``[..., queries, keys]``."""

    def first(*inputs: tf.Tensor) -> Any:
        return run(_forward, kind, inputs), ()

    def gradient(inputs: Any, scores: tf.Tensor, kept: Any, upstream: tf.Tensor) -> Any:
        return run(_backward, kind, tuple(inputs), upstream)

    def again(inputs: Any, scores: tf.Tensor, kept: Any, upstream: tf.Tensor, to: Any) -> Any:
        return run(_second, kind, tuple(inputs), upstream, tuple(to))

    (found,) = differentiable(kind.name, first, gradient, again, inputs)
    return found


def _forward(kind: Kind, inputs: Tensors) -> tf.Tensor:
    s = kind.scores(kind.options, inputs)
    matrix = _matrix(s)

    def of_keys(j: Any, blocks: tf.Tensor) -> Any:
        def with_queries(place: Place, blocks: tf.Tensor) -> list[tf.Tensor]:
            return [matrix.set(blocks, place, s.block(_at(s, place)).scores)]

        return s.grid.over_queries(j, with_queries, [blocks])

    (blocks,) = loop(0, s.grid.columns.count, of_keys, [matrix.zeros()])
    return tf.cast(matrix.joined(blocks), inputs[0].dtype)


def _matrix(s: Scores) -> BlockMatrix:
    return BlockMatrix(s.grid.rows, s.grid.columns, s.grid.batch, s.grid.dtype)


def _at(s: Scores, place: Place) -> Block:
    return Block(place, s.query[place.row], s.key[place.column])


def _backward(kind: Kind, inputs: Tensors, upstream: tf.Tensor) -> list[tf.Tensor]:
    s = kind.scores(kind.options, inputs)
    upstream = _padded(s, upstream)

    def pull(place: Place, shared: Tensors) -> Pullback:
        return s.block(_at(s, place)).pullback(place.part(upstream), shared)

    return _pulled(s, pull, inputs)[0]


def _padded(s: Scores, x: tf.Tensor) -> tf.Tensor:
    return padded(tf.cast(x, s.grid.dtype), s.grid.rows, s.grid.columns, 0)


def _second(
    kind: Kind, inputs: Tensors, upstream: tf.Tensor, directions: Tensors
) -> list[tf.Tensor]:
    """Return the gradients for ``inputs`` and ``upstream``."""
    s, to = kind.scores(kind.options, inputs), kind.scores(kind.options, directions)
    wide, matrix = _padded(s, upstream), _matrix(s)

    def pull(place: Place, shared: Tensors) -> Pullback:
        *shared, changes = shared
        tangent = s.tangent(_at(s, place), to, _at(to, place))
        changes = matrix.set(changes, place, tangent.change)
        of_query, of_key, shared = tangent.pullback(None, place.part(wide), shared)
        return of_query, of_key, [*shared, changes]

    found, (changes,) = _pulled(s, pull, inputs, [matrix.zeros()])
    return [*found, tf.cast(matrix.joined(changes), upstream.dtype)]


def _pulled(
    s: Scores, pull: Callable[..., Pullback], inputs: Tensors, more: Tensors = ()
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Return the gradients for ``inputs``, and ``more`` after all blocks.

    ``pull(place, shared)`` adds to the shared sums, and to ``more`` after them.
    """
    of_query, of_key = (BlockList.like(x, s.grid.dtype) for x in (s.query, s.key))

    def of_keys(j: Any, *sums: tf.Tensor) -> Any:
        def with_queries(
            place: Place, dq: tf.Tensor, dk: tf.Tensor, *shared: tf.Tensor
        ) -> list[tf.Tensor]:
            q_part, k_part, found = pull(place, shared)
            return [of_query.add(dq, place.row, q_part), of_key.add(dk, j, k_part), *found]

        return s.grid.over_queries(j, with_queries, sums)

    shared = s.shared_sums()
    start = [of_query.zeros(), of_key.zeros(), *shared, *more]
    dq, dk, *sums = loop(0, s.grid.columns.count, of_keys, start)
    axis = s.grid.options.axis
    found = [
        s.grid.rows.join(of_query.stack(dq), axis),
        s.grid.columns.join(of_key.stack(dk), axis),
    ]
    found += s.shared_gradients(sums[: len(shared)])
    found = [tf.cast(d, x.dtype) for d, x in zip(found, inputs, strict=True)]
    return found, sums[len(shared) :]
