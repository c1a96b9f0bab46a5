"""Rows of a large tensor, so many at a time that what is computed of them in 32 bits on the way
stays small."""

from __future__ import annotations

import itertools

import tensorflow as tf

__all__ = ["runs_of"]

#: A tensor is taken in at most so many runs, of about so many elements or more, which take 256 KiB
#: in 32 bits. Chosen by judgement.
MOST_RUNS, ELEMENTS = 16, 1 << 16


def runs_of(shape: tf.TensorShape) -> list[tuple[int, int]]:
    """Where runs of rows begin and end; none, if the tensor is to be left whole.

    Examples
    --------
    >>> runs_of(tf.TensorShape([10, 20_000]))
    [(0, 3), (3, 6), (6, 10)]
    >>> runs_of(tf.TensorShape([10, 4])), runs_of(tf.TensorShape(None))
    ([], [])
    """
    count = shape.num_elements()
    rows = shape.as_list()[0] if shape.rank else 1
    many = min((count or 0) // ELEMENTS, MOST_RUNS, rows or 1)
    return [*itertools.pairwise(rows * k // many for k in range(many + 1))] if many > 1 else []
