"""Reduce the outputs of microbatches to the output of the batch: one reducer for each tensor, made
of loop variables.

``mean``: each microbatch counts by its share, in one buffer that the loop adds to in place. (An
addition reuses the buffer of its left side if no other op reads that.) ``sum``: the same,
unweighted. ``concat``: the rows of all microbatches, in order. ``last``: the output of the last
microbatch. Gradients with few rows (``IndexedSlices``) stay slices: their rows are weighted and
concatenated, as in the gradient of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.training.microbatches.buffers import (
    Reducer,
    divided,
    is_number,
    last_of,
    sum_of,
    times,
)

__all__ = ["REDUCTIONS", "reducer", "ways_of"]

REDUCTIONS = ("mean", "sum", "concat", "last")


def ways_of(reduce: Any, outputs: Any) -> list[str]:
    """Return the reduction of each tensor of ``outputs``; ``reduce`` is one for all, or has one for
    each of their parts.

    Raises
    ------
    ArgumentError
        If ``reduce`` does not fit ``outputs``.
    """
    if isinstance(reduce, str):
        if reduce not in REDUCTIONS:
            raise ArgumentError("reduce", reduce, f"give one of {', '.join(map(repr, REDUCTIONS))}")
        return [reduce] * len(tf.nest.flatten(outputs))
    if isinstance(reduce, Mapping) and isinstance(outputs, Mapping) and set(reduce) == set(outputs):
        return [way for key in sorted(outputs) for way in ways_of(reduce[key], outputs[key])]
    both = isinstance(reduce, list | tuple) and isinstance(outputs, list | tuple)
    if both and len(reduce) == len(outputs):
        pairs = zip(reduce, outputs, strict=True)
        return [way for one, output in pairs for way in ways_of(one, output)]
    raise ArgumentError(
        "reduce",
        reduce,
        f"does not fit the result of the function, {_shape_of(outputs)}; give one of"
        f" {', '.join(map(repr, REDUCTIONS))}, or a list, tuple or mapping of the same structure"
        " with one for each part",
    )


def _shape_of(outputs: Any) -> str:
    if isinstance(outputs, Mapping):
        return f"a mapping of {sorted(outputs)}"
    return f"a {type(outputs).__name__}" + (
        f" of {len(outputs)}" if isinstance(outputs, list | tuple) else ""
    )


def reducer(way: str, output: Any, buffer: str = "float32") -> Reducer:
    """Return the reducer for ``output``, a tensor or slices that a traced function returns.

    ``way``: one of `REDUCTIONS`, or ``"weighted"``: concatenated rows, multiplied by the share of
    their microbatch. ``buffer``: as for `sum_of`.

    Raises
    ------
    ArgumentError
        If ``output`` cannot be reduced in this way.
    """
    if isinstance(output, tf.IndexedSlices):
        return _slices(way, output)
    name = output.op.name
    if way in ("concat", "weighted"):
        return _rows(way, output)
    if not output.shape.is_fully_defined():
        raise ArgumentError(
            "reduce",
            way,
            f"{name}, a result of the function, has shape {output.shape}, which may differ between"
            " microbatches; give reduce='concat' for results with a row for each example",
        )
    if way == "last":
        return last_of(output)
    if output.dtype in (tf.bool, tf.string) or (way == "mean" and not is_number(output.dtype)):
        raise ArgumentError(
            "reduce",
            way,
            f"{name}, a result of the function, has dtype {output.dtype.name}, which has no {way};"
            " give reduce= for it, such as 'sum' for counts, 'concat' for rows or 'last'",
        )
    return sum_of(output, buffer, mean=way == "mean")


def _rows(way: str, output: tf.Tensor) -> Reducer:
    if output.shape.rank == 0:
        raise ArgumentError(
            "reduce",
            way,
            f"{output.op.name}, a result of the function, is a scalar and has no rows; give"
            " 'mean', 'sum' or 'last'",
        )

    def parts(given: tf.Tensor, share: tf.Tensor) -> list[tf.Tensor]:
        return [given if way == "concat" else times(given, share)]

    def give(found: Sequence[tf.Tensor], total: tf.Tensor | None) -> tf.Tensor:
        return divided(found[0], total if way == "weighted" else None, output.dtype)

    return _side_by_side([output], parts, give)


def _slices(way: str, output: tf.IndexedSlices) -> Reducer:
    name = output.values.op.name
    if way not in ("mean", "sum"):
        raise ArgumentError(
            "reduce",
            way,
            f"{name}, a result of the function, consists of slices of a gradient; give 'mean' or"
            " 'sum'",
        )

    def parts(given: tf.IndexedSlices, share: tf.Tensor) -> list[tf.Tensor]:
        values = times(given.values, share) if way == "mean" else given.values
        return [values, given.indices]

    def give(found: Sequence[tf.Tensor], total: tf.Tensor | None) -> tf.IndexedSlices:
        shape = output.values.shape[1:]
        known = None if output.dense_shape is None else tf.get_static_value(output.dense_shape)
        if known is None and output.shape.is_fully_defined():
            known = output.shape.as_list()
        if known is None:
            raise ArgumentError(
                "function",
                name,
                f"returns slices of shape {shape} of a tensor whose shape is not known; return a"
                " dense gradient",
            )
        values = divided(found[0], total if way == "mean" else None, output.dtype)
        return tf.IndexedSlices(values, found[1], tf.constant(known, output.indices.dtype))

    return _side_by_side([output.values, output.indices], parts, give)


def _side_by_side(
    like: Sequence[tf.Tensor],
    parts: Callable[[Any, tf.Tensor], list[tf.Tensor]],
    give: Callable[[Sequence[tf.Tensor], tf.Tensor | None], Any],
) -> Reducer:
    """Return a reducer that concatenates the rows of all microbatches after the last one."""

    def begin(before: Any, count: Any) -> list[Any]:
        return [
            tf.TensorArray(one.dtype, count, element_shape=one.shape, infer_shape=False)
            for one in like
        ]

    def take(old: list[Any], k: tf.Tensor, given: Any, share: tf.Tensor) -> list[Any]:
        return [rows.write(k, part) for rows, part in zip(old, parts(given, share), strict=True)]

    def end(found: list[Any], before: Any) -> list[tf.Tensor]:
        joined = [rows.concat() for rows in found]
        if before is None:
            return joined
        return [tf.concat(pair, 0) for pair in zip(before, joined, strict=True)]

    return Reducer(begin, take, end, give)
