"""Scores of one block: which keys a query may see, what is added to them, and which weights are dropped.

No mask is broadcast to all queries and keys. One that is for keys only becomes a row of numbers, zero or `NEVER`, and rides
along in the product of queries and keys, as an additional column of both; so does what is subtracted from every row of scores in
the gradient. One that is for queries only never meets the scores. From others each block takes its part. What follows from
positions alone (causal, a window) is applied to the blocks that its border crosses; those beyond it are not computed.

A masked score is a finite number that no sum with scores changes and whose exponential is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from memsaving_gradients.transforms.attention.blocks import (
    Cut,
    Length,
    at_least,
    at_most,
    dims,
    if_long,
    up,
)

__all__ = ["NEVER", "Grid", "Setting"]

#: Blocks from, up to, and whether positions forbid some of the pairs in them.
Stretch = tuple[Any, Any, bool]

#: A masked score. Below half of it, everything is.
NEVER = -1e30


@dataclass(frozen=True)
class Setting:
    """What is known of an attention before its tensors are.

    Attributes
    ----------
    axis
        That of queries and keys: -2, or -3 where heads lie behind it.
    causal
        Whether query ``i`` sees no key behind ``i``.
    window
        Query ``i`` sees keys nearer to ``i`` than this; ``None``: all.
    rate
        The part of weights that is dropped.
    block
        Queries and keys of a block at most; ``None``: by bytes.
    """

    axis: int = -2
    causal: bool = False
    window: int | None = None
    rate: float = 0.0
    block: tuple[int, int] | None = None

    @property
    def is_positional(self) -> bool:
        """Whether positions alone forbid anything."""
        return self.causal or self.window is not None


@dataclass(frozen=True)
class Grid:
    """Queries × keys in blocks.

    Attributes
    ----------
    setting
        See there.
    rows, columns
        Queries and keys.
    lead
        The shape before them: batches, heads.
    sums
        The dtype in which sums are made: at least ``float32``.
    bars
        For each block of keys, what is added to scores: zero or `NEVER`. ``None``: nothing.
    masks
        Those that are neither for keys nor for queries alone, padded.
    bias
        What is added to scores, padded, or ``None``.
    seed
        Of the weights that are dropped.
    """

    setting: Setting
    rows: Cut
    columns: Cut
    lead: list[Length]
    sums: tf.DType
    bars: tf.Tensor | None = None
    masks: Sequence[tf.Tensor] = field(default_factory=tuple)
    bias: tf.Tensor | None = None
    seed: tf.Tensor | None = None

    def with_masks(
        self, masks: Sequence[tf.Tensor], bias: tf.Tensor | None, seed: tf.Tensor | None
    ) -> Grid:
        """The grid with masks of the shape ``[..., queries or 1, keys or 1]``, as many axes as scores, none for queries only."""
        rows, columns = self.rows, self.columns
        bars = None
        for mask in masks:
            if mask.shape.as_list()[-2] == 1:
                bar = tf.linalg.matrix_transpose(
                    tf.where(mask, _number(0, self), _number(NEVER, self))
                )
                bars = bar if bars is None else tf.minimum(bars, bar)
        if bars is not None:
            bars = columns.split(bars, -2, NEVER)
        elif columns.is_padded:
            ones = [1] * len(self.lead)
            zeros = tf.zeros([*ones, columns.length, 1], self.sums)
            bars = columns.split(zeros, -2, NEVER)
        wide = tuple(self._padded(m, False) for m in masks if m.shape.as_list()[-2] != 1)
        padded = None if bias is None else self._padded(bias, 0)
        return Grid(self.setting, rows, columns, self.lead, self.sums, bars, wide, padded, seed)

    def _padded(self, matrix: tf.Tensor, fill: Any) -> tf.Tensor:
        """``matrix`` with padding on the axes that are queries and keys."""
        for cut, axis in ((self.rows, -2), (self.columns, -1)):
            if cut.is_padded and matrix.shape.as_list()[axis] != 1:
                width: list[list[Any]] = [[0, 0] for _ in range(matrix.shape.rank)]
                width[axis] = [0, if_long(matrix, axis, cut.padding, 0)]
                matrix = tf.pad(matrix, width, constant_values=tf.cast(fill, matrix.dtype))
        return matrix

    # --- which blocks

    def keys_of(self, i: Any) -> list[Stretch]:
        """Blocks of keys that block ``i`` of queries sees."""
        first, last = i * self.rows.size, at_most((i + 1) * self.rows.size, self.rows.length) - 1
        size, window = self.columns.size, self.setting.window
        start, stop = 0, self.columns.count
        if self.setting.causal:
            stop = at_most(last // size + 1, stop)
        if window is not None:
            start = at_least(first - window + 1, 0) // size
            stop = at_most((last + window - 1) // size + 1, stop)
            return [(start, stop, True)]
        if not self.setting.causal:
            return [(start, stop, False)]
        border = at_most((first + 1) // size, stop)
        return [(start, border, False), (border, stop, True)]

    def queries_of(self, j: Any) -> list[Stretch]:
        """Blocks of queries that see block ``j`` of keys."""
        first, last = j * self.columns.size, (j + 1) * self.columns.size - 1
        size, window = self.rows.size, self.setting.window
        start, stop = 0, self.rows.count
        if self.setting.causal:
            start = at_most(first // size, stop)
        if window is not None:
            start = at_least(start, at_least(first - window + 1, 0) // size)
            stop = at_most((last + window - 1) // size + 1, stop)
            return [(start, stop, True)]
        if not self.setting.causal:
            return [(start, stop, False)]
        border = at_most(up(last, size), stop)
        return [(start, border, True), (border, stop, False)]

    # --- what is in one

    def scores(
        self,
        place: tuple[Any, Any],
        query: tf.Tensor,
        key: tf.Tensor,
        less: tf.Tensor | None = None,
        *,
        border: bool,
    ) -> tf.Tensor:
        """Scores of a block of queries and one of keys, masked.

        Parameters
        ----------
        place
            The numbers of the two blocks.
        less
            What is subtracted from each row.
        border
            Whether positions forbid some of the pairs.
        """
        bar = None if self.bars is None else self.bars[place[1]]
        scores = self.product(query, key, less, bar)
        if self.bias is not None:
            scores += tf.cast(self.part(self.bias, place), scores.dtype)
        for mask in self.masks:
            scores = tf.where(self.part(mask, place), scores, _number(NEVER, self))
        if border:
            scores = tf.where(self._sees(place), scores, _number(NEVER, self))
        return scores

    def product(
        self,
        left: tf.Tensor,
        right: tf.Tensor,
        less: tf.Tensor | None = None,
        more: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """``left @ rightᵀ - less + moreᵀ`` in the dtype of sums; ``less`` and ``more`` are columns."""
        if left.dtype != self.sums:
            product = tf.cast(tf.matmul(left, right, transpose_b=True), self.sums)
            if less is not None:
                product -= less
            return product if more is None else product + tf.linalg.matrix_transpose(more)
        # A column more in the product costs nothing; a pass over the block does.
        lefts, rights = [left], [right]
        if less is not None:
            lefts.append(-less)
            rights.append(tf.ones_like(right[..., :1]))
        if more is not None:
            lefts.append(tf.ones_like(left[..., :1]))
            rights.append(tf.broadcast_to(more, [*dims(right)[:-1], 1]))
        if len(lefts) == 1:
            return tf.matmul(left, right, transpose_b=True)
        return tf.matmul(tf.concat(lefts, -1), tf.concat(rights, -1), transpose_b=True)

    def part(self, matrix: tf.Tensor, place: tuple[Any, Any]) -> tf.Tensor:
        """The block at a place of ``matrix``, which may have one row or column for all."""
        begin: list[Any] = [0] * matrix.shape.rank
        size = dims(matrix)
        for axis, cut, number in ((-2, self.rows, place[0]), (-1, self.columns, place[1])):
            if matrix.shape.as_list()[axis] != 1:
                begin[axis] = if_long(matrix, axis, number * cut.size, 0)
                size[axis] = if_long(matrix, axis, cut.size, 1)
        return tf.slice(matrix, begin, size)

    def _sees(self, place: tuple[Any, Any]) -> tf.Tensor:
        i = place[0] * self.rows.size + tf.range(self.rows.size)[:, None]
        j = place[1] * self.columns.size + tf.range(self.columns.size)[None]
        sees = i >= j if self.setting.causal else tf.constant(True)
        if self.setting.window is not None:
            sees = tf.logical_and(sees, tf.abs(i - j) < self.setting.window)
        return sees

    def drop(self, place: tuple[Any, Any], weights: tf.Tensor) -> tf.Tensor:
        """``weights`` of a block with the dropped ones zero and the others scaled up: for a place always the same ones."""
        if not self.setting.rate:
            return weights
        kept = self.kept(place, dims(weights))
        return tf.where(kept, weights / (1 - self.setting.rate), _number(0, self))

    def kept(self, place: tuple[Any, Any], shape: Sequence[Length]) -> tf.Tensor:
        """Which weights of a block are not dropped."""
        number = place[0] * self.columns.count + place[1]
        seed = tf.random.experimental.stateless_fold_in(self.seed, number, alg="philox")
        # Integers: XLA makes other fractions of the same bits.
        bits = tf.random.stateless_uniform(shape, seed, None, None, tf.uint32, alg="philox")
        return tf.cast(bits, tf.float32) >= self.setting.rate * 2.0**32


def _number(value: float, grid: Grid) -> tf.Tensor:
    return tf.constant(value, grid.sums)
