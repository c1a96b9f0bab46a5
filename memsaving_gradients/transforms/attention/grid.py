"""Queries × keys in blocks: which blocks are computed, and which pairs of a block are masked.

No mask is broadcast to all queries and keys. A mask for keys alone becomes one number for each key,
zero or `MASKED`, which is added to scores. Each block takes its part of any other mask. A mask that
follows from positions alone (causal, a window) is applied to the blocks that its border crosses;
blocks beyond the border are not computed.

A masked score is a finite number. Adding scores does not change it, and its exponential is zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from memsaving_gradients.transforms.attention.blocks import (
    BlockedAxis,
    Length,
    block_sizes,
    ceil_div,
    loop,
    maximum,
    minimum,
    shape_of,
)
from memsaving_gradients.transforms.attention.pairs import Place, padded

__all__ = ["MASKED", "Grid", "Options"]

#: The first block, the end, and whether positions mask some pairs in these blocks.
Range = tuple[Any, Any, bool]

#: Fact: a masked score. Every score below half of it is masked.
MASKED = -1e30


@dataclass(frozen=True)
class Options:
    """The options of an attention, known before its tensors.

    Attributes
    ----------
    axis
        The axis of positions in queries and keys: -2, or -3 where the axis of heads follows it.
    causal
        Whether query ``i`` sees no key after ``i``.
    window
        Query ``i`` sees keys nearer to ``i`` than this; ``None``: all.
    dropout
        The share of weights that is dropped.
    block
        The most queries and keys of a block; ``None``: chosen by bytes.
    """

    axis: int = -2
    causal: bool = False
    window: int | None = None
    dropout: float = 0.0
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class Grid:
    """Queries × keys in blocks.

    Attributes
    ----------
    options
        The options of the attention.
    rows, columns
        Queries and keys.
    batch
        The shape of scores before queries and keys: batches, heads.
    dtype
        The dtype of scores, softmax and sums: at least ``float32``.
    key_masks
        For each block of keys, a column that is added to scores: zero or `MASKED`.
    masks
        The masks of pairs, padded.
    seed
        The seed of dropout.
    """

    options: Options
    rows: BlockedAxis
    columns: BlockedAxis
    batch: list[Length]
    dtype: tf.DType
    key_masks: tf.Tensor | None = None
    masks: Sequence[tf.Tensor] = field(default_factory=tuple)
    seed: tf.Tensor | None = None

    @staticmethod
    def of(
        options: Options, query: tf.Tensor, key: tf.Tensor, dtype: tf.DType, largest: Any = None
    ) -> Grid:
        """Return the grid of queries and keys, without masks.

        ``largest``: the most queries and keys of a block, if the options do not set them.
        """
        axis, rank = options.axis, query.shape.rank
        batch = [n for i, n in enumerate(shape_of(query)[:-1]) if i != rank + axis]
        lengths = shape_of(query)[axis], shape_of(key)[axis]
        largest = options.block or largest
        if largest is None:
            largest = block_sizes(math.prod(batch), *lengths, shape_of(key)[-1])
        rows, columns = (BlockedAxis.of(n, most) for n, most in zip(lengths, largest, strict=True))
        return Grid(options, rows, columns, batch, dtype)

    def masked(self, masks: Sequence[tf.Tensor], seed: tf.Tensor | None) -> Grid:
        """Return the grid with ``masks`` and ``seed``.

        A mask has as many axes as scores, ``[..., queries or 1, keys or 1]``. No mask is for
        queries alone.
        """
        columns, key_masks = self.columns, None
        zero, low = self._number(0), self._number(MASKED)
        for mask in masks:
            if mask.shape.as_list()[-2] == 1:
                column = tf.linalg.matrix_transpose(tf.where(mask, zero, low))
                key_masks = column if key_masks is None else tf.minimum(key_masks, column)
        if key_masks is not None:
            key_masks = columns.split(key_masks, -2, MASKED)
        elif columns.is_padded:
            ones = [1] * len(self.batch)
            zeros = tf.zeros([*ones, columns.length, 1], self.dtype)
            key_masks = columns.split(zeros, -2, MASKED)
        wide = [m for m in masks if m.shape.as_list()[-2] != 1]
        of_pairs = tuple(padded(m, self.rows, columns, False) for m in wide)
        return Grid(
            self.options, self.rows, columns, self.batch, self.dtype, key_masks, of_pairs, seed
        )

    def _number(self, value: float) -> tf.Tensor:
        return tf.constant(value, self.dtype)

    # --- the blocks that are computed

    def keys_of(self, i: Any) -> list[Range]:
        """Return the blocks of keys that block ``i`` of queries sees."""
        first, last = i * self.rows.size, minimum((i + 1) * self.rows.size, self.rows.length) - 1
        size, window = self.columns.size, self.options.window
        start, stop = 0, self.columns.count
        if self.options.causal:
            stop = minimum(last // size + 1, stop)
        if window is not None:
            start = maximum(first - window + 1, 0) // size
            stop = minimum((last + window - 1) // size + 1, stop)
            return [(start, stop, True)]
        if not self.options.causal:
            return [(start, stop, False)]
        border = minimum((first + 1) // size, stop)
        return [(start, border, False), (border, stop, True)]

    def queries_of(self, j: Any) -> list[Range]:
        """Return the blocks of queries that see block ``j`` of keys."""
        first, last = j * self.columns.size, (j + 1) * self.columns.size - 1
        size, window = self.rows.size, self.options.window
        start, stop = 0, self.rows.count
        if self.options.causal:
            start = minimum(first // size, stop)
        if window is not None:
            start = maximum(start, maximum(first - window + 1, 0) // size)
            stop = minimum((last + window - 1) // size + 1, stop)
            return [(start, stop, True)]
        if not self.options.causal:
            return [(start, stop, False)]
        border = minimum(ceil_div(last, size), stop)
        return [(start, border, True), (border, stop, False)]

    def over_keys(self, i: Any, body: Callable[..., Any], carried: Sequence[tf.Tensor]) -> Any:
        """Return ``carried`` after ``body(place, *carried)`` for all keys that ``i`` sees."""
        return self._over(self.keys_of(i), lambda j: (i, j), body, carried)

    def over_queries(self, j: Any, body: Callable[..., Any], carried: Sequence[tf.Tensor]) -> Any:
        """Return ``carried`` after ``body(place, *carried)`` for all queries that see ``j``."""
        return self._over(self.queries_of(j), lambda i: (i, j), body, carried)

    def _over(
        self,
        ranges: Sequence[Range],
        numbers: Callable[[Any], tuple[Any, Any]],
        body: Callable[..., Any],
        carried: Any,
    ) -> Any:
        for start, stop, border in ranges:

            def turn(n: Any, *values: tf.Tensor, border: bool = border) -> Any:
                return body(Place(self.rows, self.columns, *numbers(n), border), *values)

            carried = loop(start, stop, turn, carried)
        return carried

    # --- the computations in a block

    def key_mask(self, place: Place) -> tf.Tensor | None:
        """Return the column to add to the scores of each key, or ``None``."""
        return None if self.key_masks is None else self.key_masks[place.column]

    def mask_pairs(self, place: Place, scores: tf.Tensor) -> tf.Tensor:
        """Return ``scores`` after the masks of pairs and, on a border, of positions."""
        for mask in self.masks:
            scores = tf.where(place.part(mask), scores, self._number(MASKED))
        if place.border:
            scores = tf.where(self._sees(place), scores, self._number(MASKED))
        return scores

    def _sees(self, place: Place) -> tf.Tensor:
        i, j = place.positions(-2), place.positions(-1)
        sees = i >= j if self.options.causal else tf.constant(True)
        if self.options.window is not None:
            sees = tf.logical_and(sees, tf.abs(i - j) < self.options.window)
        return sees

    def product(
        self,
        left: tf.Tensor,
        right: tf.Tensor,
        minus: tf.Tensor | None = None,
        plus: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Return ``left @ rightᵀ - minus + plusᵀ`` in the dtype of sums; both terms are columns."""
        if left.dtype != self.dtype:
            product = tf.cast(tf.matmul(left, right, transpose_b=True), self.dtype)
            if minus is not None:
                product -= minus
            return product if plus is None else product + tf.linalg.matrix_transpose(plus)
        # One more column in the product costs nothing; one more pass over the block does.
        lefts, rights = [left], [right]
        if minus is not None:
            lefts.append(-minus)
            rights.append(tf.ones_like(right[..., :1]))
        if plus is not None:
            lefts.append(tf.ones_like(left[..., :1]))
            rights.append(tf.broadcast_to(plus, [*shape_of(right)[:-1], 1]))
        if len(lefts) == 1:
            return tf.matmul(left, right, transpose_b=True)
        return tf.matmul(tf.concat(lefts, -1), tf.concat(rights, -1), transpose_b=True)

    def weighted(self, weights: tf.Tensor, x: tf.Tensor, *, transpose: bool = False) -> tf.Tensor:
        """Return ``weights @ x``, or ``weightsᵀ @ x``, multiplied in the dtype of ``x``."""
        return tf.cast(tf.matmul(tf.cast(weights, x.dtype), x, transpose_a=transpose), self.dtype)

    def drop(self, place: Place, weights: tf.Tensor) -> tf.Tensor:
        """Return ``weights`` of a block after dropout: some are zero, the others scaled up.

        A place always drops the same weights.
        """
        if not self.options.dropout:
            return weights
        kept = self.kept(place, shape_of(weights))
        return tf.where(kept, weights / (1 - self.options.dropout), self._number(0))

    def kept(self, place: Place, shape: Sequence[Length]) -> tf.Tensor:
        """Return which weights of a block are not dropped."""
        seed = tf.random.experimental.stateless_fold_in(self.seed, place.number, alg="philox")
        # Integers, since XLA turns the same bits into other fractions.
        bits = tf.random.stateless_uniform(shape, seed, None, None, tf.uint32, alg="philox")
        return tf.cast(bits, tf.float32) >= self.options.dropout * 2.0**32
