"""Attention in blocks as one differentiable computation, for any kind of scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memsaving_gradients.transforms.attention.blocks import BlockedAxis, shape_of
from memsaving_gradients.transforms.attention.custom_gradient import Passes, differentiable
from memsaving_gradients.transforms.attention.grid import Options
from memsaving_gradients.transforms.attention.online_softmax import backward, forward
from memsaving_gradients.transforms.attention.scores import (
    Attention,
    TwiceDifferentiable,
    empty_rows,
)
from memsaving_gradients.transforms.attention.second_order import second

__all__ = ["Kind", "attend"]


@dataclass(frozen=True)
class Kind:
    """A kind of attention, without its tensors: eager execution traces one graph for each kind.

    Attributes
    ----------
    name
        The name of the computation, for errors.
    scores
        ``scores(options, inputs, masks, seed)`` returns the scores of inputs.
    options
        The options.
    biased
        Whether a number that is added to scores may mask all keys of a query.
    """

    name: str
    scores: Callable[..., TwiceDifferentiable]
    options: Options
    biased: bool = False

    def __call__(
        self, inputs: Sequence[tf.Tensor], masks: Sequence[tf.Tensor] = (), seed: Any = None
    ) -> Attention:
        scores = self.scores(self.options, inputs, masks, seed)
        return Attention(scores, scores.grid.columns.split(inputs[2], self.options.axis))


def attend(
    kind: Kind,
    inputs: Sequence[tf.Tensor],
    *,
    masks: Sequence[tf.Tensor] = (),
    seed: tf.Tensor | None = None,
    mean: bool = True,
) -> tf.Tensor:
    """Return attention of checked arguments.

    Parameters
    ----------
    inputs
        Queries, keys, values, and the inputs that all blocks of scores share.
    masks
        Masks with as many axes as scores, ``[..., queries or 1, keys or 1]``; a query sees a key if
        all masks are true.
    seed
        The seed of dropout.
    mean
        Whether a query that sees no key gets the mean of all values, or zero.
    """
    query, _, value = inputs[:3]
    options = kind.options
    for_queries = [m for m in masks if m.shape.as_list()[-1] == 1]
    others = tuple(m for m in masks if m.shape.as_list()[-1] != 1)
    passes = Passes(kind.name, forward, backward, second)
    output, logs = differentiable(passes, kind, inputs, (others, seed))
    empty = [tf.logical_not(_on_axis(m, options.axis)) for m in for_queries]
    if others or kind.biased or options.window is not None:
        rows = empty_rows(logs)
        queries = BlockedAxis(shape_of(query)[options.axis], shape_of(rows)[-2], shape_of(rows)[0])
        empty.append(queries.join(rows, options.axis))
    for rows in empty:
        instead = tf.zeros([], value.dtype)
        if mean:
            instead = tf.reduce_mean(value, options.axis, keepdims=True)
        output = tf.where(rows, instead, output)
    return output


def _on_axis(mask: tf.Tensor, axis: int) -> tf.Tensor:
    """Return a mask of queries, ``[..., queries, 1]``, with the queries on ``axis``."""
    if axis == -2:
        return mask
    rank = mask.shape.rank
    return tf.transpose(mask, [*range(rank - 3), rank - 2, rank - 3, rank - 1])
