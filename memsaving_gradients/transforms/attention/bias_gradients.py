"""The gradient of what is added to scores, which may have one row, column, head or batch for all: in blocks as well.

A bias takes as much as all scores only if it has an entry for each. Its gradient is summed part by part, in blocks of queries and keys:
``[blocks of queries or 1, blocks of keys or 1, ..., queries or 1, keys or 1]``.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from memsaving_gradients.transforms.attention.blocks import Length, Shelf, dims
from memsaving_gradients.transforms.attention.scores import Grid

__all__ = ["add_part", "joined", "shelf"]


def shelf(grid: Grid) -> list[Shelf]:
    """Where the gradient is summed; empty if there is no bias."""
    bias = grid.bias
    if bias is None:
        return []
    rows = (1, 1) if bias.shape.as_list()[-2] == 1 else (grid.rows.count, grid.rows.size)
    columns = (1, 1) if bias.shape.as_list()[-1] == 1 else (grid.columns.count, grid.columns.size)
    shape = [*dims(bias)[:-2], rows[1], columns[1]]
    return [Shelf(rows[0] * columns[0], shape, grid.sums)]


def add_part(
    grid: Grid, total: tf.Tensor, place: tuple[Any, Any], of_scores: tf.Tensor
) -> tf.Tensor:
    """``total`` with the gradient of a block of scores."""
    bias = grid.bias
    assert bias is not None
    more = of_scores.shape.rank - bias.shape.rank
    part = tf.reduce_sum(of_scores, list(range(more)))
    part = tf.reduce_sum(
        part, [i for i in range(bias.shape.rank) if bias.shape.as_list()[i] == 1], keepdims=True
    )
    i, j = (
        0 if bias.shape.as_list()[axis] == 1 else n for axis, n in zip((-2, -1), place, strict=True)
    )
    (shelf_of_bias,) = shelf(grid)
    return shelf_of_bias.add(total, i * _in_a_row(grid) + j, part)


def _in_a_row(grid: Grid) -> Length:
    assert grid.bias is not None
    return 1 if grid.bias.shape.as_list()[-1] == 1 else grid.columns.count


def joined(grid: Grid, total: tf.Tensor) -> tf.Tensor:
    """The gradient, in the shape of the bias."""
    bias = grid.bias
    assert bias is not None
    total = shelf(grid)[0].stacked(total)
    count = _in_a_row(grid)
    total = tf.reshape(total, [dims(total)[0] // count, count, *dims(total)[1:]])
    if bias.shape.as_list()[-1] == 1:
        total = tf.squeeze(total, 1)
    else:
        total = grid.columns.join(
            tf.transpose(tf.linalg.matrix_transpose(total), _second_first(total)), -2
        )
        total = tf.linalg.matrix_transpose(total)
    return tf.squeeze(total, 0) if bias.shape.as_list()[-2] == 1 else grid.rows.join(total, -2)


def _second_first(x: tf.Tensor) -> list[int]:
    return [1, 0, *range(2, x.shape.rank)]
