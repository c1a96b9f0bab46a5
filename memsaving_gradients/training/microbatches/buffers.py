"""Buffers in which loops over microbatches add up outputs.

16-bit numbers are summed in 32 bits, as 16 bits lose small addends. Or they are summed in 16 bits
and rounded at random (:mod:`~memsaving_gradients.training.precision.rounding`), which loses nothing
on average; the numbers themselves are the seed, so that the same batch gives the same sums. A large
sum of them has several buffers of some rows each, updated one after the other: 32-bit intermediate
results exist for some rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memsaving_gradients.training.precision.rounding import LOW, rounded
from memsaving_gradients.training.precision.runs import runs_of

__all__ = ["BUFFERS", "Reducer", "divided", "is_number", "last_of", "sum_of", "times"]

BUFFERS = ("float32", "stochastic")


@dataclass(frozen=True)
class Reducer:
    """The reduction of one output over microbatches, as four functions.

    Attributes
    ----------
    begin
        From the result of earlier stretches (``None``: there were none) and the number of
        microbatches to the loop variables.
    take
        From the loop variables before a microbatch, its number, its output and its weight to the
        loop variables after it.
    end
        From the loop variables and the result of earlier stretches to the result with this stretch.
    give
        From that result and the total weight to the reduced output, divided by that total; not if
        weights are shares of the examples (``None``).
    """

    begin: Callable[[Any, Any], list[Any]]
    take: Callable[[list[Any], tf.Tensor, Any, tf.Tensor], list[Any]]
    end: Callable[[list[Any], Any], Any]
    give: Callable[[Any, tf.Tensor | None], Any]


def is_number(dtype: tf.DType) -> bool:
    """Return whether values of this type have means and gradients."""
    return bool(dtype.is_floating or dtype.is_complex)


def last_of(output: tf.Tensor) -> Reducer:
    """Return a reducer that keeps the output of the last microbatch."""
    return Reducer(
        begin=lambda before, count: [_zeros(output, output.dtype) if before is None else before],
        take=lambda old, k, new, share: [new],
        end=lambda found, before: found[0],
        give=lambda found, total: found,
    )


def sum_of(output: tf.Tensor, buffer: str, *, mean: bool) -> Reducer:
    """Return a reducer that sums outputs, each times its share for a ``mean``. ``buffer``: the type
    in which 16-bit numbers are summed, of `BUFFERS`."""
    low = output.dtype in LOW
    dtype = _wide(output.dtype) if buffer == "float32" else output.dtype
    add = _added_at_random if low and buffer == "stochastic" else _added
    runs: list[Any] = [None]
    if low:
        runs = runs_of(output.shape) or runs

    def begin(before: Any, count: Any) -> list[Any]:
        return [_zeros(output, dtype, run) for run in runs] if before is None else before

    def take(old: list[Any], k: tf.Tensor, new: tf.Tensor, share: tf.Tensor) -> list[Any]:
        found: list[tf.Tensor] = []
        for sums, run in zip(old, runs, strict=True):
            # Intermediate results exist for one run at a time.
            with tf.control_dependencies(found[-1:]):
                more = new if run is None else new[run[0] : run[1]]
                found.append(add(sums, k, more, share if mean else tf.constant(1.0)))
        return found

    def give(found: Sequence[tf.Tensor], total: tf.Tensor | None) -> tf.Tensor:
        parts = [divided(part, total if mean else None, output.dtype) for part in found]
        return parts[0] if len(parts) == 1 else tf.concat(parts, 0)

    return Reducer(begin, take, lambda found, before: found, give)


def divided(found: tf.Tensor, total: tf.Tensor | None, dtype: tf.DType) -> tf.Tensor:
    """Return ``found`` as ``dtype``, divided by ``total``, a sum of weights, if there is one."""
    if total is not None:
        wide = _wide(found.dtype)
        found = tf.math.divide_no_nan(tf.cast(found, wide), tf.cast(total, wide))
    return tf.cast(found, dtype)


def times(given: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Return the product in the type of ``given``, computed in 32 bits or more."""
    wide = _wide(given.dtype)
    return tf.cast(tf.cast(given, wide) * tf.cast(share, wide), given.dtype)


def _wide(dtype: tf.DType) -> tf.DType:
    """Return the type in which numbers of ``dtype`` are summed."""
    return tf.float32 if dtype in LOW else dtype


def _zeros(output: tf.Tensor, dtype: tf.DType, run: Any = None) -> tf.Tensor:
    rows = [] if run is None else [run[1] - run[0]]
    return tf.zeros([*rows, *output.shape.as_list()[len(rows) :]], dtype)


def _added(old: tf.Tensor, k: tf.Tensor, new: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    return old + tf.cast(new, old.dtype) * tf.cast(share, old.dtype)


def _added_at_random(old: tf.Tensor, k: tf.Tensor, new: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    total = _added(tf.cast(old, tf.float32), k, new, share)
    seed = tf.stack([k, tf.bitcast(tf.reduce_sum(total), tf.int32)])
    return rounded(total, old.dtype, seed)
