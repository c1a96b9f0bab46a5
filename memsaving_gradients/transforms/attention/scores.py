"""The interface between attention and its passes over blocks: scores block by block, and values.

The passes (`memsaving_gradients.transforms.attention.online_softmax`) compute the softmax and the
product with values. `Scores` computes one block of scores. It also takes the gradient for that
block back to its queries, its keys and the inputs that all blocks share. Dot products, additive
scores, and scores found in a graph each implement `Scores`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memsaving_gradients.transforms.attention.grid import MASKED, Grid
from memsaving_gradients.transforms.attention.pairs import Place

__all__ = [
    "Attention",
    "Block",
    "Pullback",
    "ScoreBlock",
    "ScoreTangent",
    "Scores",
    "TwiceDifferentiable",
    "empty_rows",
]

#: Replaces the logarithm of the sum of a query that sees no key: all its weights become zero.
_EMPTY_ROW = -MASKED

#: The gradients for a block of queries and a block of keys, and the sums of gradients for inputs
#: that all blocks share.
Pullback = tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]


@dataclass(frozen=True)
class Block:
    """Queries and keys of one block, and its place."""

    place: Place
    query: tf.Tensor
    key: tf.Tensor


@dataclass(frozen=True)
class ScoreBlock:
    """The scores of one block.

    Attributes
    ----------
    scores
        ``[..., queries, keys]``, masked, in the dtype of sums.
    pullback
        ``pullback(of_scores, shared)`` takes a gradient for the scores back to the inputs.
    """

    scores: tf.Tensor
    pullback: Callable[[tf.Tensor, Sequence[tf.Tensor]], Pullback]


@dataclass(frozen=True)
class ScoreTangent:
    """The scores of one block, and their change in a direction.

    Attributes
    ----------
    scores
        As in `ScoreBlock`.
    change
        The derivative of the scores, unmasked, in the direction.
    pullback
        ``pullback(of_scores, of_change, shared)`` takes gradients for both back to the inputs.
        ``of_scores`` may be ``None``, for zero.
    """

    scores: tf.Tensor
    change: tf.Tensor
    pullback: Callable[[tf.Tensor | None, tf.Tensor, Sequence[tf.Tensor]], Pullback]


@dataclass(frozen=True)
class Scores(ABC):
    """Scores of queries and keys.

    The passes keep the numbers that `normalized` returns for each query, and pass them back as
    ``minus``: ``exp(scores - minus)`` are the weights.

    Attributes
    ----------
    grid
        The pairs of queries and keys.
    zero
        A scalar zero of the dtype of sums, which grappler does not know to be zero.
    query, key
        In blocks, ``[count, ..., size, width]``.
    """

    grid: Grid
    zero: tf.Tensor
    query: tf.Tensor
    key: tf.Tensor

    #: How many numbers the passes keep for each query.
    kept = 1
    #: Whether ``dO Vᵀ - δ`` is one product with an additional column. That saves a pass over the
    #: block (2 % of a step of 2 × 4 × 1024 positions of width 64 on a CPU). It costs copies of both
    #: operands (1 MiB).
    subtracts_in_product = False

    @property
    def lowest(self) -> float:
        """The initial value of the running maximum.

        All masked scores are far below it: their weights are zero even before a query sees a key.
        """
        return MASKED / 2

    def normalized(
        self, most: tf.Tensor, total: tf.Tensor, mixed: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        """Return the output of a block of queries, and the numbers to keep for each of them.

        Parameters
        ----------
        most, total
            The maximum of each row of scores, and its sum of ``exp(scores - most)``.
        mixed
            The sum of values, weighted by ``exp(scores - most)``.
        """
        output = tf.math.divide_no_nan(mixed, total)
        empty = tf.constant(_EMPTY_ROW, self.grid.dtype)
        return output, tf.where(total > 0, most + tf.math.log(total), empty)

    @abstractmethod
    def block(self, at: Block, minus: Sequence[tf.Tensor] = ()) -> ScoreBlock:
        """Return the scores of a block minus ``minus``: columns with a number for each query."""

    def at(self, place: Place) -> Block:
        """Return the queries and keys of a block."""
        return Block(place, self.query[place.row], self.key[place.column])

    def shared_sums(self) -> list[tf.Tensor]:
        """Return the initial sums of gradients for inputs that all blocks share: zeros."""
        return []

    def shared_gradients(self, sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the gradients for inputs that all blocks share, from their sums."""
        return list(sums)

    def zeros(self, *shape: Any) -> tf.Tensor:
        """Return zeros for a sum."""
        return tf.fill(shape, self.zero)


class TwiceDifferentiable(Scores):
    """Scores whose gradient has a gradient."""

    @abstractmethod
    def tangent(
        self, at: Block, direction: Any, to: Block, minus: Sequence[tf.Tensor] = ()
    ) -> ScoreTangent:
        """Return the scores of a block minus ``minus``, and their change in a direction.

        Parameters
        ----------
        direction
            Scores of the same class, built from the directions of all inputs.
        to
            The directions of the block's queries and keys.
        """


@dataclass(frozen=True)
class Attention:
    """An attention in blocks: its scores, and values ``[count, ..., size, width]``."""

    scores: Scores
    value: tf.Tensor


def empty_rows(logs: tf.Tensor) -> tf.Tensor:
    """Return which queries see no key, from the logarithms that `Scores` keep."""
    return logs >= _EMPTY_ROW / 2
