"""How what microbatches give becomes what the batch would have given: one reducer for each tensor, made of loop variables.

``mean``: each microbatch counts by its share, in one buffer that the loop adds to in place (an addition whose left side nobody
else reads takes its buffer). ``sum``: the same, unweighted. ``concat``: rows side by side, in their order. ``last``: what the last microbatch gave.
Gradients with few rows (``IndexedSlices``) stay that: their rows are weighted and put side by side, as they stood in the gradient of the whole batch.

Sums of 16-bit numbers are made in 32 bits, since small addends would be lost in them; or in 16, rounded at random (:mod:`~memsaving_gradients.precision.rounding`),
which loses nothing on average: each rounding is decided by the numbers themselves, so that the same batch gives the same sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.precision.rounding import LOW, rounded

__all__ = ["BUFFERS", "REDUCTIONS", "Reducer", "divided", "reducer", "ways_of"]

REDUCTIONS = ("mean", "sum", "concat", "last")
BUFFERS = ("float32", "stochastic")


@dataclass(frozen=True)
class Reducer:
    """What is done with one output.

    Attributes
    ----------
    begin
        From what earlier stretches came to (``None``: there were none) and the number of microbatches to the loop variables.
    take
        The loop variables after a microbatch: from those before, its number, what it gave and its share of the examples.
    end
        From the loop variables, and what earlier stretches came to, to what they come to with this one.
    """

    begin: Callable[[Any, Any], list[Any]]
    take: Callable[[list[Any], tf.Tensor, Any, tf.Tensor], list[Any]]
    end: Callable[[list[Any], Any], Any]


def ways_of(reduce: Any, outputs: Any) -> list[str]:
    """The reduction of each tensor of ``outputs``: ``reduce`` is one for all, or has one for each of their parts.

    Raises
    ------
    ArgumentError
        If it does not fit them.
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
        f"does not fit what the function returns, {_shape_of(outputs)}; give one of {', '.join(map(repr, REDUCTIONS))}, or a list, "
        "tuple or mapping of the same make with one for each part",
    )


def _shape_of(outputs: Any) -> str:
    if isinstance(outputs, Mapping):
        return f"a mapping of {sorted(outputs)}"
    return f"a {type(outputs).__name__}" + (
        f" of {len(outputs)}" if isinstance(outputs, list | tuple) else ""
    )


def reducer(way: str, output: Any, buffer: str = "float32") -> Reducer:
    """What to do with ``output``, a tensor or slices that a traced function returns.

    ``way``: one of `REDUCTIONS`, or ``"weighted"``: rows side by side, those of each microbatch times its share. ``buffer``: what sums of
    16-bit numbers are made in, of `BUFFERS`.

    Raises
    ------
    ArgumentError
        If it cannot be reduced in this way.
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
            f"{name} that the function returns has shape {output.shape}, of which microbatches differ; give reduce='concat' for what has a row "
            "for each example",
        )
    if way == "last":
        return _kept(output, lambda old, k, new, share: new)
    if output.dtype in (tf.bool, tf.string) or (way == "mean" and not _is_real(output.dtype)):
        raise ArgumentError(
            "reduce",
            way,
            f"{name} that the function returns has dtype {output.dtype.name}, which has no {way}; give reduce= for it, such as 'sum' for "
            "counts, 'concat' for rows or 'last'",
        )
    add = _added_at_random if buffer == "stochastic" and output.dtype in LOW else _added
    return _kept(
        output,
        add if way == "mean" else functools.partial(_unweighted, add),
        wide(output.dtype, buffer),
    )


def wide(dtype: tf.DType, buffer: str = "float32") -> tf.DType:
    """The type that numbers of a type are added up in."""
    return tf.float32 if dtype in LOW and buffer == "float32" else dtype


def _added(old: tf.Tensor, k: tf.Tensor, new: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    return old + tf.cast(new, old.dtype) * tf.cast(share, old.dtype)


def _unweighted(add: Any, old: tf.Tensor, k: tf.Tensor, new: tf.Tensor, share: tf.Tensor) -> Any:
    return add(old, k, new, tf.constant(1.0))


def _times(given: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    dtype = wide(given.dtype)
    return tf.cast(tf.cast(given, dtype) * tf.cast(share, dtype), given.dtype)


def _added_at_random(old: tf.Tensor, k: tf.Tensor, new: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    total = _added(tf.cast(old, tf.float32), k, new, share)
    seed = tf.stack([k, tf.bitcast(tf.reduce_sum(total), tf.int32)])
    return rounded(total, old.dtype, seed)


def _is_real(dtype: tf.DType) -> bool:
    return bool(dtype.is_floating or dtype.is_complex)


def _kept(
    output: tf.Tensor, take: Callable[[Any, Any, Any, Any], Any], dtype: tf.DType | None = None
) -> Reducer:
    """One buffer of the output's shape."""

    def begin(before: Any, count: Any) -> list[Any]:
        return [tf.zeros(output.shape, dtype or output.dtype) if before is None else before]

    def end(found: list[Any], before: Any) -> Any:
        return found[0]

    return Reducer(begin, lambda old, k, new, share: [take(old[0], k, new, share)], end)


def divided(way: str, output: Any, found: Any, total: tf.Tensor | None) -> Any:
    """What an output comes to: ``found``, in the output's type, and divided by the sum of what microbatches counted where that is not one."""
    if isinstance(found, tf.IndexedSlices):
        values = divided(way, output.values, found.values, total)
        return tf.IndexedSlices(values, found.indices, found.dense_shape)
    if total is not None and way in ("mean", "weighted"):
        found = tf.math.divide_no_nan(found, tf.cast(total, found.dtype))
    return tf.cast(found, output.dtype)


def _rows(way: str, output: tf.Tensor) -> Reducer:
    if output.shape.rank == 0:
        raise ArgumentError(
            "reduce",
            way,
            f"{output.op.name} that the function returns is a scalar and has no rows; give 'mean', 'sum' or 'last'",
        )

    def parts(given: tf.Tensor, share: tf.Tensor) -> list[tf.Tensor]:
        return [given if way == "concat" else _times(given, share)]

    return _side_by_side([output], lambda found: found[0], parts)


def _slices(way: str, output: tf.IndexedSlices) -> Reducer:
    name = output.values.op.name
    if way not in ("mean", "sum"):
        raise ArgumentError(
            "reduce",
            way,
            f"{name} that the function returns are slices of a gradient; give 'mean' or 'sum'",
        )

    def parts(given: tf.IndexedSlices, share: tf.Tensor) -> list[tf.Tensor]:
        values = _times(given.values, share) if way == "mean" else given.values
        return [values, given.indices]

    def whole(found: Sequence[tf.Tensor]) -> tf.IndexedSlices:
        shape = output.values.shape[1:]
        known = None if output.dense_shape is None else tf.get_static_value(output.dense_shape)
        if known is None and output.shape.is_fully_defined():
            known = output.shape.as_list()
        if known is None:
            raise ArgumentError(
                "function",
                name,
                f"returns slices of {shape} of a tensor whose shape is not known; return a dense gradient",
            )
        return tf.IndexedSlices(found[0], found[1], tf.constant(known, output.indices.dtype))

    return _side_by_side([output.values, output.indices], whole, parts)


def _side_by_side(
    like: Sequence[tf.Tensor],
    whole: Callable[[Sequence[tf.Tensor]], Any],
    parts: Callable[[Any, tf.Tensor], list[tf.Tensor]],
) -> Reducer:
    """Rows of every microbatch, in a list of tensors until all are there."""

    def begin(before: Any, count: Any) -> list[Any]:
        return [
            tf.TensorArray(one.dtype, count, element_shape=one.shape, infer_shape=False)
            for one in like
        ]

    def take(old: list[Any], k: tf.Tensor, given: Any, share: tf.Tensor) -> list[Any]:
        return [rows.write(k, part) for rows, part in zip(old, parts(given, share), strict=True)]

    def end(found: list[Any], before: Any) -> Any:
        joined = [rows.concat() for rows in found]
        if before is not None:
            earlier = (
                [before.values, before.indices]
                if isinstance(before, tf.IndexedSlices)
                else [before]
            )
            joined = [tf.concat(pair, 0) for pair in zip(earlier, joined, strict=True)]
        return whole(joined)

    return Reducer(begin, take, end)
