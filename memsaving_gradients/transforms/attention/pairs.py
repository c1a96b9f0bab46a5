"""Tensors with an entry for each pair of a query and a key, block by block.

Masks and biases may have one row, one column, or one batch for all; a part of them then has one as
well. Numbers that loops compute for each pair go into a TensorList, one block after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memsaving_gradients.transforms.attention.blocks import (
    BlockedAxis,
    BlockList,
    Length,
    shape_of,
)

__all__ = ["ONE", "BlockMatrix", "Place", "padded"]

#: Fact: an axis of length 1.
ONE = BlockedAxis(1, 1, 1)


def padded(matrix: tf.Tensor, rows: BlockedAxis, columns: BlockedAxis, fill: Any) -> tf.Tensor:
    """Return ``matrix`` with padding on its last two axes where they are queries and keys."""
    rank = matrix.shape.rank
    for axis, blocked in ((-2, rows), (-1, columns)):
        if blocked.is_padded and rank >= -axis and matrix.shape.as_list()[axis] != 1:
            width: list[list[Any]] = [[0, 0] for _ in range(rank)]
            width[axis] = [0, _if_long(matrix, axis, blocked.padding, 0)]
            matrix = tf.pad(matrix, width, constant_values=tf.cast(fill, matrix.dtype))
    return matrix


def _if_long(matrix: tf.Tensor, axis: int, long: Length, short: Length) -> Length:
    """Return ``long``, or ``short`` where an axis of unknown length turns out to have length 1."""
    if matrix.shape.as_list()[axis] is not None:
        return long
    return tf.where(tf.shape(matrix)[axis] == 1, short, long)


@dataclass(frozen=True)
class Place:
    """The place of a block of queries and a block of keys.

    Attributes
    ----------
    rows, columns
        Queries and keys.
    row, column
        The numbers of the two blocks.
    border
        Whether positions mask some of the pairs.
    """

    rows: BlockedAxis
    columns: BlockedAxis
    row: Any
    column: Any
    border: bool = False

    @property
    def number(self) -> Any:
        """The number of the place, counted row by row."""
        return self.row * self.columns.count + self.column

    def positions(self, axis: int) -> tf.Tensor:
        """Return the positions of queries (axis -2, a column) or of keys (axis -1, a row)."""
        if axis == -2:
            return (self.row * self.rows.size + tf.range(self.rows.size))[:, tf.newaxis]
        return self.column * self.columns.size + tf.range(self.columns.size)

    def part(self, matrix: tf.Tensor) -> tf.Tensor:
        """Return the block of a `padded` matrix, of any rank."""
        rank = matrix.shape.rank
        begin: list[Any] = [0] * rank
        size = shape_of(matrix)
        axes = [axis for axis in (-2, -1) if rank >= -axis and matrix.shape.as_list()[axis] != 1]
        for axis in axes:
            blocked, number = ((self.rows, self.row), (self.columns, self.column))[axis]
            begin[axis] = _if_long(matrix, axis, number * blocked.size, 0)
            size[axis] = _if_long(matrix, axis, blocked.size, 1)
        return tf.slice(matrix, begin, size) if axes else matrix


@dataclass(frozen=True)
class BlockMatrix:
    """The layout of a TensorList that holds a tensor with an entry for each pair, in blocks.

    Attributes
    ----------
    rows, columns
        Queries and keys, or `ONE` where the tensor has one row or one column for all.
    batch
        The shape of the tensor before them; 1 where it is the same for all.
    dtype
        The dtype of its blocks.
    """

    rows: BlockedAxis
    columns: BlockedAxis
    batch: Sequence[Length]
    dtype: tf.DType

    @property
    def _list(self) -> BlockList:
        shape = [*self.batch, self.rows.size, self.columns.size]
        return BlockList(self.rows.count * self.columns.count, shape, self.dtype)

    def _number(self, place: Place) -> Any:
        row = 0 if self.rows is ONE else place.row
        column = 0 if self.columns is ONE else place.column
        return row * self.columns.count + column

    def zeros(self) -> tf.Tensor:
        """Return the list, full of zeros."""
        return self._list.zeros()

    def set(self, blocks: tf.Tensor, place: Place, block: tf.Tensor) -> tf.Tensor:
        """Return ``blocks`` with ``block`` at ``place``."""
        return self._list.set(blocks, self._number(place), block)

    def add(self, blocks: tf.Tensor, place: Place, block: tf.Tensor) -> tf.Tensor:
        """Return ``blocks`` with ``block`` added at ``place``, summed over axes of length 1."""
        ones = [k for k, n in enumerate(self._list.shape) if isinstance(n, int) and n == 1]
        block = tf.reduce_sum(block, ones, keepdims=True)
        return self._list.add(blocks, self._number(place), block)

    def joined(self, blocks: tf.Tensor) -> tf.Tensor:
        """Return the tensor, without padding."""
        rows, columns, rank = self.rows, self.columns, len(self.batch)
        x = self._list.stack(blocks)
        x = tf.reshape(x, [rows.count, columns.count, *self._list.shape])
        x = tf.transpose(x, [*range(2, rank + 2), 0, rank + 2, 1, rank + 3])
        lengths = [axis.count * axis.size for axis in (rows, columns)]
        x = tf.reshape(x, [*self.batch, *lengths])
        if not (rows.is_padded or columns.is_padded):
            return x
        return tf.slice(x, [0] * (rank + 2), [*self.batch, rows.length, columns.length])
