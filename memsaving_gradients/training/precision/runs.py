"""Runs of rows of a large tensor: computing one run at a time keeps intermediate results in 32 bits
small."""

from __future__ import annotations

import itertools

import tensorflow as tf

__all__ = ["runs_of"]

#: The most runs of a tensor, and about the fewest elements of a run, which take 256 KiB in 32 bits.
#: Chosen by judgement.
MOST_RUNS, ELEMENTS = 16, 1 << 16


def runs_of(shape: tf.TensorShape) -> list[tuple[int, int]]:
    """Return where each run of rows begins and ends; empty, if the tensor stays whole.

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
